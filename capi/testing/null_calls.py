"""Writes calls of each function of the C header with NULL in the place of each of its handles.

null_calls.py distgrad.h >null_calls.h

null_test.c includes them. Made of the header, so that no new function is forgotten: one that takes
something of which this does not know how to make a valid one ends the build.
"""
import re
import sys

# What may be NULL, or have NULL in it, by function and parameter.
MAY_BE_NULL = {
    ("dg_broadcast", "tensors"),
    ("dg_data_parallel_forward", "inputs"),
    ("dg_message_create", "tensors"),
    ("dg_optimizer_create_adam", "worker"),
    ("dg_optimizer_create_adamw", "worker"),
    ("dg_optimizer_create_sgd", "worker"),
    ("dg_reduce_add", "tensors"),
    ("dg_responder_answer", "error"),
    ("dg_responder_answer", "reply"),
}
# Fields of structs that have handles: those for which null_test.c has a case of its own, those that
# may be NULL or have NULL in them, and those that the library sets.
TESTED = {
    "dg_checkpoint_contents.optimizers",
    "dg_checkpoint_contents.tensors",
    "dg_data_parallel_options.buffers",
    "dg_gradient_averager_options.buffers",
    "dg_pipeline_stage.tied",
}
FIELDS_MAY_BE_NULL = {
    "dg_backward_options.root_gradients",
    "dg_call_options.cancellation",
    "dg_call_options.context",
    "dg_pipeline_stages_options.averager",
    "dg_value.data",
    "dg_value.tensor",
}
SET_BY_LIBRARY = {
    "dg_micro_batch.inputs",
    "dg_micro_batch.outputs",
    "dg_micro_batch.targets",
    "dg_replica.buffers",
    "dg_replica.inputs",
    "dg_replica.parameters",
    "dg_request.cancellation",
    "dg_request.context",
    "dg_request.message",
}
# Valid ones of types that are no handles, of which the default will not do.
VALUES = {
    "dg_str": 'DG_STR("here")',
    "const dg_str*": '(const dg_str[]){DG_STR("cpu")}',
    "const dg_entry*": '(const dg_entry[]){{DG_STR("one"), DG_STR("1")}}',
    "const dg_value*": "(const dg_value[]){dg_value_none()}",
    "const dg_pipeline_stage* const*": "(const dg_pipeline_stage* const[]){&valid.stage}",
    "dg_code": "DG_UNKNOWN",
    "bool": "false",
    "double": "0",
}
SCALARS = {"bool", "double", "int32_t", "int64_t", "size_t", "uint32_t", "uint64_t"}


def parameters_of(text):
    """Splits a list of parameters into pairs of type and name; that of a callback is its whole type."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text + ","):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    pairs = []
    for part in parts:
        callback = re.fullmatch(r"(.*\(\*)(\w+)(\)\(.*\))", part)
        if callback:
            pairs.append((callback.group(1) + callback.group(3), callback.group(2)))
        elif part != "void":
            pairs.append(re.fullmatch(r"(.*?[ *])(\w+)", part).groups())
    return [(kind.strip(), name) for kind, name in pairs]


class Header:
    def __init__(self, text):
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
        text = re.sub(r"^#(?:.*\\\n)*.*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"\s+", " ", text)
        self.handles = set(re.findall(r"typedef struct (dg_\w+) \1;", text))
        self.callbacks = set(re.findall(r"typedef [^;{}]*?\(\*(dg_\w+)\)\(", text))
        self.structs = re.findall(r"typedef struct (dg_\w+) \{(.*?)\} \1;", text)
        self.functions = [
            (result.strip(), name, parameters_of(arguments)) for result, name, arguments in re.findall(
                r"DG_API (?:DG_MUST_USE )?([^;()]*?)\b(dg_\w+)\(([^;]*?)\) DG_NOEXCEPT;", text)]
        if len(self.functions) != text.count("DG_API "):
            sys.exit("null_calls.py reads %d functions of %d" % (len(self.functions), text.count("DG_API ")))

    def handle(self, kind):
        """The type of a handle that a parameter is, or None."""
        found = re.fullmatch(r"(?:const )?(?:struct )?(dg_\w+)\*", kind)
        return found.group(1) if found and found.group(1) in self.handles else None

    def array(self, kind):
        """The type of the handles of which a parameter is an array, or None."""
        found = re.fullmatch(r"(?:const )?(dg_\w+)\* const\*", kind)
        return found.group(1) if found and found.group(1) in self.handles else None

    def valid(self, function, kind, name):
        if (function, name) in MAY_BE_NULL and self.handle(kind):
            return "NULL"
        if self.handle(kind):
            return "valid." + self.handle(kind)[len("dg_"):]
        if self.array(kind):
            return "(%s[]){valid.%s}" % (kind[:-1].strip(), self.array(kind)[len("dg_"):])
        if kind in VALUES:
            return VALUES[kind]
        if "(*" in kind or kind in self.callbacks:
            return "NULL" if name == "destroy" else "(%s)never" % kind
        if kind in SCALARS:
            return "1" if re.search(r"(count|capacity)$", name) else "0"
        # Where a result is to be stored.
        if kind.endswith("*") and kind[:-1] in SCALARS | {"dg_value"}:
            return "(%s[1]){%s}" % (kind[:-1], "{0}" if kind == "dg_value*" else "0")
        if kind.endswith("**"):
            return "(%s[1]){NULL}" % kind[:-1]
        # What is optional.
        if kind in ("void*", "const void*", "double* const*") or kind[:-1] in {"const " + s for s in SCALARS}:
            return "NULL"
        if re.fullmatch(r"const dg_\w+_(options|contents)\*", kind):
            return "NULL"
        sys.exit("null_calls.py has nothing for '%s %s' of %s" % (kind, name, function))

    def check_fields(self):
        found = set()
        for struct, body in self.structs:
            # Of a callback that is a field, the parameters are its own.
            body = re.sub(r"\(\*\w+\)\([^()]*\)", "", body)
            for kind, name in re.findall(r"((?:const )?(?:struct )?dg_\w+\*(?: const\*)?) (\w+);", body):
                if self.handle(kind) or self.array(kind):
                    found.add("%s.%s" % (struct, name))
        known = TESTED | FIELDS_MAY_BE_NULL | SET_BY_LIBRARY
        if found != known:
            sys.exit("null_calls.py: these fields are in the header or in its lists alone: %s" % (found ^ known))


def main(path):
    with open(path, encoding="utf-8") as file:
        header = Header(file.read())
    header.check_fields()
    print("/* Of %s, by null_calls.py. */" % path)
    exceptions, count = set(MAY_BE_NULL), 0
    for result, function, parameters in header.functions:
        for i, (kind, name) in enumerate(parameters):
            if not header.handle(kind) and not header.array(kind):
                continue
            arguments = [header.valid(function, *parameter) for parameter in parameters]
            arguments[i] = "NULL"
            call = "%s(%%s)" % function
            if result != "dg_error*":
                print("%s%s;" % ("" if result == "void" else "(void)", call % ", ".join(arguments)))
                continue
            exceptions.discard((function, name))
            if header.array(kind):
                print('REFUSED("%s is NULL, and its size is 1", %s);' % (name, call % ", ".join(arguments)))
                arguments[i] = "(%s[]){NULL}" % kind[:-1].strip()
                count += 1
            if (function, name) in MAY_BE_NULL:
                continue
            what = name + "[0]" if header.array(kind) else name
            print('REFUSED("%s is NULL, and has to be a valid %s", %s);' %
                  (what, header.handle(kind) or header.array(kind), call % ", ".join(arguments)))
            count += 1
    if exceptions:
        sys.exit("null_calls.py: these take no handle: %s" % exceptions)
    print("enum { REFUSALS = %d };" % count)


main(sys.argv[1])
