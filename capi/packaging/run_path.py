"""Takes Bazel's own folders out of the run path of a library, which ends with the one that it is
installed with: run_path.py LIBRARY.

Bazel puts its folder first, whatever the rule says; an installed library must not look for libtorch
in folders that it has never heard of. The string is shortened where it stands, from its beginning:
the linker lets strings share their ends.
"""
import struct
import sys

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_STRTAB, DT_RPATH, DT_RUNPATH = 0, 5, 15, 29


def shorten(data):
    """Leaves of the run path in `data`, an ELF file for 64 bits, the last folder, and returns that."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF file of 64 bits, least byte first")
    table, = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    # Of each segment: type, place in the file, address, size in the file.
    segments = []
    for at in range(table, table + size * count, size):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, at)
        segments.append((kind, offset, address, length))
    entries = {}  # of the dynamic section: tag to its place and value
    for kind, offset, _, length in segments:
        if kind == PT_DYNAMIC:
            for at in range(offset, offset + length, 16):
                tag, value = struct.unpack_from("<qQ", data, at)
                if tag == DT_NULL:
                    break
                entries[tag] = at, value
    if DT_RPATH in entries or DT_RUNPATH not in entries or DT_STRTAB not in entries:
        raise ValueError("no DT_RUNPATH, or a DT_RPATH beside it")
    at, start = entries[DT_RUNPATH]
    address = entries[DT_STRTAB][1]
    strings = next(offset + address - first for kind, offset, first, length in segments
                   if kind == PT_LOAD and first <= address < first + length)
    begin = strings + start
    text = bytes(data[begin:data.index(b"\0", begin)])
    last = text.rsplit(b":", 1)[-1]
    gone = len(text) - len(last)
    data[begin:begin + gone] = bytes(gone)
    struct.pack_into("<Q", data, at + 8, start + gone)
    return last.decode()


if __name__ == "__main__":
    with open(sys.argv[1], "r+b") as file:
        library = bytearray(file.read())
        try:
            shorten(library)
        except ValueError as error:
            sys.exit("%s: %s" % (sys.argv[1], error))
        file.seek(0)
        file.write(library)
