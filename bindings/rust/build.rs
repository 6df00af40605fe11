//! Finds libdistgrad: by `DISTGRAD_DIR`, an installed tree with `include/` and `lib/`; then by
//! pkg-config. Without it documentation can be made, and nothing else.
use std::{env, path::PathBuf};

const BRIDGES: [&str; 3] =
    ["src/ffi/bridge.rs", "src/ffi/pipeline.rs", "src/ffi/worker_options.rs"];
const SOURCES: [&str; 3] = ["src/ffi/shim.cc", "src/ffi/pipeline.cc", "src/ffi/worker_options.cc"];
const HEADERS: [&str; 2] = ["src/ffi/shim.h", "src/ffi/pipeline.h"];

fn main() {
    for source in BRIDGES.iter().chain(&SOURCES).chain(&HEADERS) {
        println!("cargo::rerun-if-changed={source}");
    }
    println!("cargo::rerun-if-env-changed=DISTGRAD_DIR");
    println!("cargo::rustc-check-cfg=cfg(distgrad_missing)");
    let Some((include, lib)) = find() else {
        // Not an error here, for rustdoc goes through here too: src/lib.rs says what to do.
        println!("cargo::rustc-cfg=distgrad_missing");
        // A path that is never there has cargo look again each time: it may be installed by then.
        println!("cargo::rerun-if-changed=no-library");
        return;
    };
    for header in ["distgrad.h", "distgrad.hpp"] {
        println!("cargo::rerun-if-changed={}", include.join("distgrad").join(header).display());
    }
    cxx_build::bridges(BRIDGES)
        .files(SOURCES)
        .include(&include)
        .std("c++17")
        .warnings_into_errors(false)
        .compile("distgrad_rust");
    println!("cargo::rustc-link-search=native={}", lib.display());
    println!("cargo::rustc-link-lib=dylib=distgrad");
    // For this crate's own programs; those of others get DEP_DISTGRAD_LIB to do the same.
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo::metadata=lib={}", lib.display());
    println!("cargo::metadata=include={}", include.display());
}

/// The folders of the headers and of the library.
fn find() -> Option<(PathBuf, PathBuf)> {
    // A relative path starts in the crate's folder, where cargo runs this; what is told of it here
    // is used in other folders.
    let here = env::current_dir().expect("a working folder");
    if let Some(prefix) = env::var_os("DISTGRAD_DIR").filter(|prefix| !prefix.is_empty()) {
        let prefix = here.join(prefix);
        let (include, lib) = (prefix.join("include"), prefix.join("lib"));
        for needed in [include.join("distgrad/distgrad.hpp"), lib.join("libdistgrad.so")] {
            if !needed.exists() {
                println!(
                    "cargo::warning=DISTGRAD_DIR is {}, but {} is not there",
                    prefix.display(),
                    needed.display()
                );
                return None;
            }
        }
        return Some((include, lib));
    }
    let found =
        pkg_config::Config::new().range_version("1.0".."2").cargo_metadata(false).probe("distgrad");
    match found {
        // A library in the system's own folders has no paths to tell.
        Ok(found) => Some((
            here.join(
                found.include_paths.first().cloned().unwrap_or_else(|| "/usr/include".into()),
            ),
            here.join(found.link_paths.first().cloned().unwrap_or_else(|| "/usr/lib".into())),
        )),
        Err(error) => {
            let text = error.to_string();
            let said = text.lines().find(|line| line.starts_with("Package")).unwrap_or("failed");
            println!("cargo::warning=DISTGRAD_DIR is not set, and pkg-config: {said}");
            None
        }
    }
}
