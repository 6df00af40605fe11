//! Arguments and results of operators.
use crate::{Dtype, Error, Result, Tensor};
use std::borrow::Cow;

/// An argument or a result of an operator. Arguments may borrow; results own.
///
/// A dtype, layout or memory format is an integer, a device a string.
///
/// ```
/// use distgrad::{op, values, Tensor, Value};
/// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// let keep = Value::Bool(true); // or true.into()
/// let sums = op("aten::sum.dim_IntList", &values![&x, [1], keep])?;
/// assert_eq!(sums.shape(), [2, 1]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_value")]
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Value<'a> {
    /// Nothing: an optional argument that is not given.
    None,
    /// `int`
    Integer(i64),
    /// `float`
    Real(f64),
    /// `bool`
    Bool(bool),
    /// `complex`: real and imaginary part.
    Complex(f64, f64),
    /// `str`, `Device`
    String(Cow<'a, str>),
    /// `Tensor`
    Tensor(Cow<'a, Tensor>),
    /// `int[]`
    Integers(Cow<'a, [i64]>),
    /// `float[]`
    Reals(Cow<'a, [f64]>),
    /// `bool[]`
    Bools(Cow<'a, [bool]>),
    /// `Tensor[]`, `Tensor?[]`
    Tensors(Cow<'a, [Option<Tensor>]>),
}

/// A number that an operator takes: in arithmetic an integer keeps a tensor of integers one, a real
/// number makes it one of float32, as in Python; a division always makes float32. What is filled
/// with a number keeps its dtype: one of integers cuts a real number off.
///
/// ```
/// use distgrad::{Dtype, Scalar, Tensor};
/// let ids = Tensor::arange(3)?;
/// assert_eq!(ids.add_scalar(1)?.to_vec::<i64>()?, [1, 2, 3]);
/// assert_eq!(ids.add_scalar(1.0)?.dtype(), Dtype::FLOAT32);
/// let offset = Scalar::from(1i64 << 40); // what the methods make of their arguments
/// assert_eq!(ids.mul_scalar(offset)?.dtype(), Dtype::INT64);
/// # distgrad::Result::Ok(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// An integer.
    Integer(i64),
    /// A real number.
    Real(f64),
}

macro_rules! scalar_from {
    ($($from:ty => $kind:ident;)*) => {$(
        impl From<$from> for Scalar {
            fn from(number: $from) -> Self {
                Self::$kind(number.into())
            }
        }
    )*};
}
scalar_from! {
    i32 => Integer;
    i64 => Integer;
    f32 => Real;
    f64 => Real;
}

impl From<Scalar> for Value<'_> {
    fn from(number: Scalar) -> Self {
        match number {
            Scalar::Integer(integer) => Value::Integer(integer),
            Scalar::Real(real) => Value::Real(real),
        }
    }
}

macro_rules! from {
    ($($from:ty, $name:ident => $value:expr;)*) => {$(
        impl<'a> From<$from> for Value<'a> {
            fn from($name: $from) -> Self {
                $value
            }
        }
    )*};
}
from! {
    (), _none => Value::None;
    i32, integer => Value::Integer(integer.into());
    i64, integer => Value::Integer(integer);
    f32, real => Value::Real(real.into());
    f64, real => Value::Real(real);
    bool, boolean => Value::Bool(boolean);
    Dtype, dtype => Value::Integer(dtype.code().into());
    &'a str, text => Value::String(text.into());
    String, text => Value::String(text.into());
    Tensor, tensor => Value::Tensor(Cow::Owned(tensor));
    &'a Tensor, tensor => Value::Tensor(Cow::Borrowed(tensor));
    Option<&'a Tensor>, tensor => tensor.map_or(Value::None, Value::from);
    &'a [i64], integers => Value::Integers(integers.into());
    Vec<i64>, integers => Value::Integers(integers.into());
    &'a [f64], reals => Value::Reals(reals.into());
    Vec<f64>, reals => Value::Reals(reals.into());
    &'a [bool], bools => Value::Bools(bools.into());
    &'a [Tensor], tensors => Value::Tensors(tensors.iter().cloned().map(Some).collect());
    &'a [&'a Tensor], tensors => Value::Tensors(tensors.iter().map(|&one| Some(one.clone())).collect());
    &'a [Option<Tensor>], tensors => Value::Tensors(tensors.into());
}
impl<const N: usize> From<[i64; N]> for Value<'_> {
    fn from(integers: [i64; N]) -> Self {
        Value::Integers(integers.to_vec().into())
    }
}
impl<const N: usize> From<[f64; N]> for Value<'_> {
    fn from(reals: [f64; N]) -> Self {
        Value::Reals(reals.to_vec().into())
    }
}
impl<const N: usize> From<[&Tensor; N]> for Value<'_> {
    fn from(tensors: [&Tensor; N]) -> Self {
        Value::Tensors(tensors.into_iter().map(|tensor| Some(tensor.clone())).collect())
    }
}

macro_rules! try_into {
    ($($to:ty, $what:literal, $pattern:pat => $value:expr;)*) => {$(
        /// `Code::InvalidArgument` if it is something else.
        impl TryFrom<Value<'_>> for $to {
            type Error = Error;

            fn try_from(value: Value<'_>) -> Result<Self> {
                match value {
                    $pattern => $value,
                    other => Err(Error::invalid(format!(concat!("{:?} is not ", $what), other))),
                }
            }
        }
    )*};
}
try_into! {
    i64, "an integer", Value::Integer(integer) => Ok(integer);
    f64, "a real number", Value::Real(real) => Ok(real);
    bool, "a bool", Value::Bool(boolean) => Ok(boolean);
    String, "a string", Value::String(text) => Ok(text.into_owned());
    Tensor, "a tensor", Value::Tensor(tensor) => Ok(tensor.into_owned());
    Vec<i64>, "a list of integers", Value::Integers(integers) => Ok(integers.into_owned());
    Vec<f64>, "a list of real numbers", Value::Reals(reals) => Ok(reals.into_owned());
    Vec<bool>, "a list of bools", Value::Bools(bools) => Ok(bools.into_owned());
    Vec<Tensor>, "a list of tensors", Value::Tensors(tensors) => tensors
        .into_owned()
        .into_iter()
        .map(|tensor| tensor.ok_or_else(|| Error::invalid("there is a gap in the list of tensors")))
        .collect();
}

/// The arguments of an operator: `values![&x, 1, [2, 3], ()]` is an array of [`Value`]s.
///
/// ```
/// use distgrad::{op, values, Tensor};
/// let x = Tensor::from_slice(&[1.0f32, 2.0], &[2])?;
/// let sum = op("aten::add.Scalar", &values![&x, 10.0, 1])?;
/// assert_eq!(sum.to_vec::<f32>()?, [11.0, 12.0]);
/// # distgrad::Result::Ok(())
/// ```
#[macro_export]
macro_rules! values {
    ($($value:expr),* $(,)?) => {
        [$($crate::Value::from($value)),*]
    };
}
