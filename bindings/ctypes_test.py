"""distgrad from a language that knows nothing of it: Python's ctypes, and the C header alone.

ctypes_test.py LIBRARY

Two workers in this process: operators, a handler, an error that travels, a backward through both,
an optimizer step, and calls that asyncio awaits. It follows README.md, step by step.
"""
import asyncio
import ctypes as c
import os
import sys
import tempfile
import threading

lib = c.CDLL(sys.argv[1])

# 1. Handles are pointers without a type. Functions return an error, or NULL, where not said.
HANDLE = c.c_void_p


# 2. The structs, in their order.
class Str(c.Structure):
    _fields_ = [("data", c.c_char_p), ("size", c.c_size_t)]


class List(c.Structure):
    _fields_ = [("data", c.c_void_p), ("size", c.c_size_t)]


class As(c.Union):
    _fields_ = [("integer", c.c_int64), ("real", c.c_double), ("string", Str), ("tensor", HANDLE), ("list", List)]


class Value(c.Structure):
    _fields_ = [("kind", c.c_uint64), ("value", As)]


class WorkerOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("name", Str), ("rank", c.c_uint32), ("world_size", c.c_uint32),
                ("rendezvous", Str), ("transport", Str), ("host", Str), ("key_file", Str),
                ("thread_count", c.c_uint64), ("timeout_ms", c.c_int64), ("join_timeout_ms", c.c_int64),
                ("flags", c.c_uint64)]


class Request(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("function", Str), ("from", c.c_uint64), ("message", HANDLE),
                ("context", HANDLE), ("timeout_ms", c.c_int64)]


class CallOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("context", HANDLE), ("timeout_ms", c.c_int64)]


class SgdOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("learning_rate", c.c_double), ("momentum", c.c_double),
                ("dampening", c.c_double), ("weight_decay", c.c_double), ("flags", c.c_uint64)]


NONE, INTEGER, REAL, TENSOR, INTEGERS = 0, 1, 2, 6, 7
FLOAT32, INVALID_ARGUMENT, NOT_FOUND = 6, 3, 5
DESTROY = c.CFUNCTYPE(None, c.c_void_p)
HANDLER = c.CFUNCTYPE(HANDLE, c.c_void_p, c.POINTER(Request), c.POINTER(HANDLE))

# What is passed to each function.
P, S, N = c.c_void_p, Str, c.c_size_t
for name, arguments in {
        "dg_tensor_from_data": [P, c.c_int32, P, N, P], "dg_tensor_data": [HANDLE, P],
        "dg_tensor_require_grad": [HANDLE], "dg_op_tensors": [S, P, N, P, N],
        "dg_message_create": [P, N, P, N, P], "dg_message_tensor": [HANDLE, N, P],
        "dg_worker_create": [P, P], "dg_worker_register": [HANDLE, S, HANDLER, P, DESTROY],
        "dg_worker_barrier": [HANDLE, c.c_int64, c.c_uint64],
        "dg_worker_shutdown": [HANDLE, c.c_int64, c.c_uint64],
        "dg_worker_call": [HANDLE, S, S, HANDLE, P, P], "dg_context_create": [HANDLE, P],
        "dg_context_backward": [HANDLE, P, N, P], "dg_context_gradient": [HANDLE, HANDLE, P],
        "dg_optimizer_create_sgd": [HANDLE, S, P, N, P, P], "dg_optimizer_step": [HANDLE, HANDLE],
        "dg_worker_call_async": [HANDLE, S, S, HANDLE, P, P], "dg_future_result": [HANDLE, P],
        "dg_completions_create": [P], "dg_completions_watch": [HANDLE, HANDLE, c.c_uint64],
        "dg_completions_take": [HANDLE, P, N, P],
        "dg_error_create": [c.c_int32, S]}.items():
    getattr(lib, name).argtypes, getattr(lib, name).restype = arguments, HANDLE
for kind in "error tensor message worker context optimizer future completions".split():
    function = getattr(lib, "dg_%s_destroy" % kind)
    function.argtypes, function.restype = [HANDLE], None
lib.dg_error_code.argtypes, lib.dg_error_code.restype = [HANDLE], c.c_int32
lib.dg_error_message.argtypes, lib.dg_error_message.restype = [HANDLE], Str
lib.dg_tensor_element_count.argtypes, lib.dg_tensor_element_count.restype = [HANDLE], c.c_int64
lib.dg_completions_descriptor.argtypes, lib.dg_completions_descriptor.restype = [HANDLE], c.c_int32
lib.dg_message_tensor_count.argtypes, lib.dg_message_tensor_count.restype = [HANDLE], c.c_size_t


def text(string):
    data = string.encode()
    return Str(data, len(data))


# 3. An error becomes an exception, and is destroyed.
class Error(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def check(error):
    if error:
        message = lib.dg_error_message(error)
        raised = Error(lib.dg_error_code(error), c.string_at(message.data, message.size).decode())
        lib.dg_error_destroy(error)
        raise raised


# 4. A handle becomes an object that destroys it, once.
class Handle:
    def __init__(self, kind, function, *arguments):
        out = HANDLE()
        check(getattr(lib, function)(*arguments, c.byref(out)))
        self.kind, self.handle = kind, out.value

    def __del__(self):
        if hasattr(self, "handle"):
            getattr(lib, "dg_%s_destroy" % self.kind)(self.handle)

    @property
    def _as_parameter_(self):
        return self.handle


class Tensor(Handle):
    def __init__(self, function, *arguments):
        super().__init__("tensor", function, *arguments)

    @staticmethod
    def of(*numbers):
        return Tensor("dg_tensor_from_data", (c.c_float * len(numbers))(*numbers), FLOAT32,
                      (c.c_int64 * 1)(len(numbers)), 1)

    def values(self):
        data = HANDLE()
        check(lib.dg_tensor_data(self, c.byref(data)))
        return list((c.c_float * lib.dg_tensor_element_count(self)).from_address(data.value))


def handles(items):
    return (HANDLE * len(items))(*[item.handle for item in items])


# 5. One function for all operators: each argument by its type.
def value(argument):
    if isinstance(argument, Tensor):
        return Value(TENSOR, As(tensor=argument.handle))
    if isinstance(argument, float):
        return Value(REAL, As(real=argument))
    if isinstance(argument, int):
        return Value(INTEGER, As(integer=argument))
    if isinstance(argument, list):
        array = (c.c_int64 * len(argument))(*argument)
        made = Value(INTEGERS, As(list=List(c.addressof(array), len(argument))))
        made.array = array  # borrowed by the struct
        return made
    return Value(NONE)


class Adopted(Tensor):
    def __init__(self, handle):  # pylint: disable=super-init-not-called
        self.kind, self.handle = "tensor", handle


def op(name, *arguments):
    out = HANDLE()
    values = [value(argument) for argument in arguments]
    check(lib.dg_op_tensors(text(name), (Value * len(values))(*values), len(values), c.byref(out), 1))
    return Adopted(out.value)


def message(*tensors):
    return Handle("message", "dg_message_create", None, 0, handles(tensors), len(tensors))


# 6. A closure becomes a handler: it is kept alive until its destructor is called, and what it raises
# becomes an error.
kept, ended = {}, []


@DESTROY
def destroy(user_data):
    ended.append(kept.pop(user_data))


def register(worker, name, function):
    @HANDLER
    def handler(_, request, reply):
        try:
            sent = request[0].message
            tensors = [Tensor("dg_message_tensor", sent, i) for i in range(lib.dg_message_tensor_count(sent))]
            made = message(*function(*tensors))
            reply[0], made.handle = made.handle, None  # taken
            return None
        except Exception as error:  # pylint: disable=broad-except
            return lib.dg_error_create(INVALID_ARGUMENT, text(repr(error)))

    key = len(kept) + 1
    kept[key] = handler
    check(lib.dg_worker_register(worker, text(name), handler, key, destroy))


def together(function):
    """Runs function(rank) for both workers at once; ctypes lets go of Python's lock."""
    results = [None, None]

    def run(rank):
        results[rank] = function(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Completions:
    """Futures of distgrad for asyncio: its loop is told of the descriptor."""

    def __init__(self):
        self.queue, self.waiting, self.next = Handle("completions", "dg_completions_create"), {}, 0
        asyncio.get_running_loop().add_reader(lib.dg_completions_descriptor(self.queue), self.take)

    def close(self):
        asyncio.get_running_loop().remove_reader(lib.dg_completions_descriptor(self.queue))

    def take(self):
        tags, count = (c.c_uint64 * 64)(), c.c_size_t()
        check(lib.dg_completions_take(self.queue, tags, 64, c.byref(count)))
        for tag in tags[:count.value]:
            self.waiting.pop(tag).set_result(None)

    async def result(self, future):
        done = asyncio.get_running_loop().create_future()
        self.next += 1
        self.waiting[self.next] = done
        check(lib.dg_completions_watch(self.queue, future, self.next))
        await done
        return Handle("message", "dg_future_result", future)


async def call_many(worker, to, function, requests):
    completions = Completions()
    try:
        futures = [Handle("future", "dg_worker_call_async", worker, text(to), text(function), request, None)
                   for request in requests]
        return await asyncio.gather(*map(completions.result, futures), return_exceptions=True)
    finally:
        completions.close()


def main(folder):
    assert op("aten::sum.dim_IntList", Tensor.of(1, 2, 3), [0]).values() == [6]
    assert op("aten::add.Tensor", Tensor.of(1), 0.5, 2).values() == [2]
    try:
        op("aten::no_such_thing")
        raise AssertionError("it has to fail")
    except Error as error:
        assert error.code == NOT_FOUND and "no_such_thing" in str(error)

    def create(rank):
        options = WorkerOptions(struct_size=c.sizeof(WorkerOptions), rank=rank, world_size=2,
                                rendezvous=text("file://%s/workers" % folder))
        return Handle("worker", "dg_worker_create", c.byref(options))

    front, back = together(create)
    scale, x = Tensor.of(3, 4), Tensor.of(1, 2)
    for leaf in (scale, x):
        check(lib.dg_tensor_require_grad(leaf))
    register(back, "scale", lambda tensor: [op("aten::mul.Tensor", tensor, scale)])
    sgd = SgdOptions(c.sizeof(SgdOptions), 0.5)
    optimizers = [Handle("optimizer", "dg_optimizer_create_sgd", worker, text(""), handles([leaf]), 1, c.byref(sgd))
                  for worker, leaf in ((front, x), (back, scale))]
    together(lambda rank: check(lib.dg_worker_barrier((front, back)[rank], 60000, 0)))

    context = Handle("context", "dg_context_create", front)
    options = CallOptions(c.sizeof(CallOptions), context.handle)

    def call(request):
        return Handle("message", "dg_worker_call", front, text("worker1"), text("scale"), request, c.byref(options))

    y = Tensor("dg_message_tensor", call(message(x)), 0)
    assert y.values() == [3, 8]
    try:
        call(message())
        raise AssertionError("it has to fail")
    except Error as error:
        assert error.code == INVALID_ARGUMENT and "argument" in str(error)
    loss = op("aten::sum", y)
    check(lib.dg_context_backward(context, handles([loss]), 1, None))
    assert Tensor("dg_context_gradient", context, x).values() == [3, 4]
    check(lib.dg_optimizer_step(optimizers[0], context))
    assert x.values() == [1 - 1.5, 2 - 2] and scale.values() == [3 - 0.5, 4 - 1]
    requests = [message(Tensor.of(i, i)) for i in range(100)] + [message()]
    replies = asyncio.run(call_many(front, "worker1", "scale", requests))
    assert [Tensor("dg_message_tensor", reply, 0).values()[0] for reply in replies[:-1]] == [2.5 * i for i in range(100)]
    assert isinstance(replies[-1], Error) and replies[-1].code == INVALID_ARGUMENT
    together(lambda rank: check(lib.dg_worker_shutdown((front, back)[rank], 60000, 0)))
    del context, front, back
    assert len(ended) == 1 and not kept
    print("all of it works from Python's ctypes")


with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as scratch:
    main(scratch)
