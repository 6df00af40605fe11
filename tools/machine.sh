# Functions of tools/bazel, which sources this: what a machine can do, and its disk cache.
# shellcheck shell=bash

# machine_problem OS_RELEASE ARCHITECTURE: prints why nothing can be installed or fetched on a machine
# with that /etc/os-release, or nothing. What is pinned is of one architecture and one distribution.
machine_problem() {
  local key value name="a system without /etc/os-release" codename=""
  if [[ -r $1 ]]; then
    name="a system without a name"
    while IFS='=' read -r key value; do
      value=${value//[\"\']/}
      case $key in
        PRETTY_NAME) name=$value ;;
        VERSION_CODENAME | DEBIAN_CODENAME) if [[ $codename != bookworm ]]; then codename=$value; fi ;;
      esac
    done <"$1"
  fi
  if [[ $2 != x86_64 ]]; then
    echo "this machine is a $2, and libtorch and the packages are pinned for x86_64 alone"
  elif [[ $codename != bookworm ]]; then
    echo "this is $name, and the packages are those of Debian 12 (bookworm); in a container of that (docker run --platform linux/amd64 -it debian:12, git installed) it works"
  fi
}

# system_name OS_RELEASE: its id and version, as in debian12.
system_name() {
  local key value id=linux version=""
  if [[ -r $1 ]]; then
    while IFS='=' read -r key value; do
      value=${value//[\"\']/}
      case $key in
        ID) id=$value ;;
        VERSION_ID) version=$value ;;
      esac
    done <"$1"
  fi
  echo "${id//[^a-z0-9]/_}${version//[^a-z0-9.]/_}"
}

# proxy_variables: the names of those that are set, with commas between, for sudo to keep; never
# their values, which may have passwords.
proxy_variables() {
  local name names=""
  for name in http_proxy https_proxy ftp_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY; do
    if [[ -n ${!name:-} ]]; then names+=,$name; fi
  done
  echo "${names#,}"
}

# draws ARGUMENT...: whether a call of Bazel runs a program that draws.
draws() {
  local argument
  for argument in "$@"; do
    if [[ $argument == -- ]]; then return 1; fi
    if [[ $argument =~ examples:(fashion_mnist|replicas|transformer)$ ]]; then return 0; fi
  done
  return 1
}

# compiler_of ARGUMENT...: the name or path of the compiler that a call of Bazel builds with.
compiler_of() {
  local argument compiler=${CC:-gcc}
  for argument in "$@"; do
    case $argument in
      --) break ;;
      --repo_env=CC=*) compiler=${argument#--repo_env=CC=} ;;
      --config=fuzz) compiler=clang ;; # as .bazelrc has it
    esac
  done
  echo "$compiler"
}

# disk_cache CACHE OS_RELEASE COMPILER: makes and prints the folder for results of this compiler on
# this system. Bazel itself tells compilers apart by their path alone.
disk_cache() {
  local folder version
  # The second is clang's, whose is the whole version; gcc's is the first number of it.
  version=$("$3" -dumpfullversion 2>/dev/null) || version=$("$3" -dumpversion 2>/dev/null) || version=unknown
  folder=$1/bazel-$(system_name "$2")-$(basename "$3")$version
  if [[ ! -e $folder ]]; then
    mkdir -p "$1"
    # One without a name of these was filled here, too; whoever comes first goes on with it, alone.
    if [[ -d $1/bazel && -z $(find "$1" -maxdepth 1 -lname bazel -print -quit) ]]; then ln -sfn bazel "$folder"; else mkdir -p "$folder"; fi
  fi
  echo "$folder"
}

# prune FOLDER MEGABYTES: once a day, removes what was not used for longest, until the folder has
# four fifths of that. A build that goes on meanwhile makes anew what it misses.
prune() {
  local stamp=$1/pruned
  if [[ -n $(find "$stamp" -mtime -1 2>/dev/null) ]]; then return 0; fi
  (
    flock -n 9 || exit 0 # another call is at it
    # Of each file the time of its last use (where reading leaves no time, of its making), its size
    # in KB and its path.
    find "$1/" -type f ! -path "$stamp" -printf '%A@ %T@ %k %p\0' |
      awk -v RS='\0' -v ORS='\0' -v most="$(($2 * 1024))" '
        { used[NR] = $1 > $2 ? $1 : $2; size[NR] = $3; sum += $3; sub(/^[^ ]+ [^ ]+ [^ ]+ /, ""); path[NR] = $0 }
        END { if (sum > most) for (i = 1; i <= NR; ++i) printf "%017.4f %d %d %s%c", used[i], size[i], sum, path[i], 0 }' |
      sort -z -n |
      awk -v RS='\0' -v ORS='\0' -v least="$(($2 * 1024 * 4 / 5))" '
        { if (NR == 1) sum = $3
          if (sum <= least) next # not exit, which would stop sort in the middle
          sum -= $2
          sub(/^[^ ]+ [^ ]+ [^ ]+ /, ""); print }' |
      xargs -0 -r rm -f --
    touch "$stamp"
  ) 9>"$1/pruned.lock"
}
