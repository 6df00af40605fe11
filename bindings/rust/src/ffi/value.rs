//! `dg_value`, from and to [`Value`].
use super::{
    bridge::raw,
    handle::{Owned, TensorHandle, ValuesHandle},
};
use crate::{Error, Result, Tensor, Value};
use cxx::{kind::Trivial, type_id, ExternType};
use std::{borrow::Cow, ffi::c_void, slice};

/// `dg_value`: a kind, and a union of 16 bytes. shim.h asserts sizes and offsets.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawValue {
    kind: u64,
    data: Data,
}

#[derive(Clone, Copy)]
#[repr(C)]
union Data {
    integer: i64,
    real: f64,
    complex: [f64; 2],
    tensor: *const c_void,
    list: List,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct List {
    data: *const c_void,
    size: usize,
}

// SAFETY: the layout is that of dg_value, which is plain data.
unsafe impl ExternType for RawValue {
    type Id = type_id!("dg_value");
    type Kind = Trivial;
}

const NONE: u64 = 0;
const INTEGER: u64 = 1;
const REAL: u64 = 2;
const BOOL: u64 = 3;
const COMPLEX: u64 = 4;
const STRING: u64 = 5;
const TENSOR: u64 = 6;
const INTEGERS: u64 = 7;
const REALS: u64 = 8;
const BOOLS: u64 = 9;
const TENSORS: u64 = 10;

fn list<T>(kind: u64, data: &[T]) -> RawValue {
    RawValue { kind, data: Data { list: List { data: data.as_ptr().cast(), size: data.len() } } }
}

/// Calls `call` with `values` as C sees them. They borrow from `values`, so they end with the call.
pub(crate) fn with_raw<T>(values: &[Value<'_>], call: impl FnOnce(&[RawValue]) -> T) -> T {
    let lists: Vec<Vec<TensorHandle>> = values
        .iter()
        .map(|value| match value {
            Value::Tensors(tensors) => {
                tensors.iter().map(|tensor| Tensor::handle_or_null(tensor.as_ref())).collect()
            }
            _ => Vec::new(),
        })
        .collect();
    let raw: Vec<RawValue> = values
        .iter()
        .zip(&lists)
        .map(|(value, tensors)| {
            let of = |kind, data| RawValue { kind, data };
            match value {
                Value::None => of(NONE, Data { integer: 0 }),
                Value::Integer(integer) => of(INTEGER, Data { integer: *integer }),
                Value::Real(real) => of(REAL, Data { real: *real }),
                Value::Bool(boolean) => of(BOOL, Data { integer: i64::from(*boolean) }),
                Value::Complex(real, imaginary) => {
                    of(COMPLEX, Data { complex: [*real, *imaginary] })
                }
                Value::String(text) => list(STRING, text.as_bytes()),
                Value::Tensor(tensor) => of(TENSOR, Data { tensor: tensor.handle().pointer() }),
                Value::Integers(integers) => list(INTEGERS, integers),
                Value::Reals(reals) => list(REALS, reals),
                Value::Bools(bools) => list(BOOLS, bools),
                Value::Tensors(_) => list(TENSORS, tensors),
            }
        })
        .collect();
    call(&raw)
}

/// Takes the results of an operator.
pub(crate) fn take_values(handle: ValuesHandle) -> Result<Vec<Value<'static>>> {
    let values = Owned::new(handle);
    (0..raw::values_count(values.get()))
        .map(|index| {
            let raw = raw::values_get(values.get(), index)?;
            // SAFETY: "`kind` says which member of `as` is set", and "What *out points to lives as
            // long as `values`, the handles of tensors too", which is longer than `raw`.
            unsafe { raw.to_value() }
        })
        .collect()
}

impl RawValue {
    /// # Safety
    /// The library made it, and what it points to is alive.
    unsafe fn to_value(self) -> Result<Value<'static>> {
        let data = self.data;
        unsafe {
            Ok(match self.kind {
                NONE => Value::None,
                INTEGER => Value::Integer(data.integer),
                REAL => Value::Real(data.real),
                BOOL => Value::Bool(data.integer != 0),
                COMPLEX => Value::Complex(data.complex[0], data.complex[1]),
                STRING => {
                    let text = String::from_utf8_lossy(data.list.elements::<u8>()).into_owned();
                    Value::String(Cow::Owned(text))
                }
                TENSOR => {
                    match Tensor::share(TensorHandle::from_pointer(data.tensor.cast_mut()))? {
                        Some(tensor) => Value::Tensor(Cow::Owned(tensor)),
                        None => Value::None,
                    }
                }
                INTEGERS => Value::Integers(Cow::Owned(data.list.elements().to_vec())),
                REALS => Value::Reals(Cow::Owned(data.list.elements().to_vec())),
                BOOLS => {
                    let bools = data.list.elements::<u8>().iter().map(|&byte| byte != 0).collect();
                    Value::Bools(Cow::Owned(bools))
                }
                TENSORS => {
                    let handles = data.list.elements::<TensorHandle>();
                    let tensors: Result<_> = handles.iter().copied().map(Tensor::share).collect();
                    Value::Tensors(Cow::Owned(tensors?))
                }
                kind => return Err(Error::unknown_kind(kind)),
            })
        }
    }
}

impl List {
    /// # Safety
    /// It is a list of `T`, and lives for `'a`.
    unsafe fn elements<'a, T>(self) -> &'a [T] {
        if self.size == 0 {
            return &[]; // the pointer may be null then
        }
        unsafe { slice::from_raw_parts(self.data.cast(), self.size) }
    }
}
