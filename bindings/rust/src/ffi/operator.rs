//! Torch's operators.
use super::{bridge::raw, handle::Handle, value::take_values, value::with_raw};
use crate::{Error, Result, Scalar, Tensor, Value};

/// Runs a torch operator that has one tensor as its result; autograd records it.
///
/// `name` is the operator's name with its overload; `arguments` are those of its schema, in order,
/// keyword-only ones too. Those missing at the end get their defaults.
///
/// ```
/// # fn main() -> distgrad::Result<()> {
/// use distgrad::{op, values, Tensor};
/// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// let sums = op("aten::sum.dim_IntList", &values![&x, [1]])?;
/// assert_eq!(sums.to_vec::<f32>()?, [3.0, 7.0]);
/// # Ok(())
/// # }
/// ```
///
/// `Code::NotFound` for an unknown name; `Code::InvalidArgument`, before anything runs, for
/// arguments that do not fit the schema, and afterwards if the result is not one tensor;
/// `Code::PermissionDenied` for an operator that does more than compute, which only [`op_unchecked`]
/// runs: one that writes to its arguments, trusts sizes or how its arguments fit together, or touches
/// files or a tensor's storage.
#[doc(alias = "dg_op_tensors")]
#[doc(alias = "dg_op_check_functional")]
pub fn op(name: &str, arguments: &[Value<'_>]) -> Result<Tensor> {
    raw::op_check_functional(name)?;
    // SAFETY: it only computes.
    unsafe { op_unchecked(name, arguments) }
}

/// Runs any torch operator, otherwise as [`op`].
///
/// ```
/// use distgrad::{op_unchecked, values, Tensor};
/// let x = Tensor::from_slice(&[1.0f32, 2.0], &[2])?;
/// // SAFETY: no other thread has this memory.
/// unsafe { op_unchecked("aten::mul_.Scalar", &values![&x, 3.0]) }?;
/// assert_eq!(x.to_vec::<f32>()?, [3.0, 6.0]);
/// # distgrad::Result::Ok(())
/// ```
///
/// It is not for safe code:
///
/// ```compile_fail,E0133
/// let x = distgrad::Tensor::from_slice(&[1.0f32], &[1])?;
/// distgrad::op_unchecked("aten::set_data", &distgrad::values![&x, &x])?;
/// # distgrad::Result::Ok(())
/// ```
///
/// # Safety
/// The operator does nothing with these arguments that memory safety forbids. While one runs that
/// writes in place (its name ends in `_` or `.out`), no other thread reads or writes the memory that
/// it writes to, also not through another tensor that shares it. An operator that trusts sizes stays
/// within the memory.
pub unsafe fn op_unchecked(name: &str, arguments: &[Value<'_>]) -> Result<Tensor> {
    let handle = with_raw(arguments, |arguments| raw::op_tensor(name, arguments))?;
    if handle.is_null() {
        return Err(Error::invalid(format!("{name} gave no tensor")));
    }
    Ok(Tensor::own(handle))
}

/// Runs a torch operator with any results. Otherwise as [`op`].
///
/// ```
/// use distgrad::{ops, values, Tensor, Value};
/// let x = Tensor::from_slice(&[3.0f32, 1.0, 2.0], &[3])?;
/// let sorted = ops("aten::sort", &values![&x, -1, true])?; // the last dimension, descending
/// let [Value::Tensor(elements), Value::Tensor(places)] = &sorted[..] else { panic!("{sorted:?}") };
/// assert_eq!(elements.to_vec::<f32>()?, [3.0, 2.0, 1.0]);
/// assert_eq!(places.to_vec::<i64>()?, [0, 2, 1]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_op_call")]
#[doc(alias = "dg_values")]
pub fn ops(name: &str, arguments: &[Value<'_>]) -> Result<Vec<Value<'static>>> {
    raw::op_check_functional(name)?;
    // SAFETY: it only computes.
    unsafe { ops_unchecked(name, arguments) }
}

/// Runs any torch operator, otherwise as [`ops`].
///
/// ```
/// use distgrad::{ops_unchecked, values, Tensor};
/// let x = Tensor::from_slice(&[-1.0f32, 2.0], &[2])?;
/// // SAFETY: no other thread has this memory.
/// let results = unsafe { ops_unchecked("aten::relu_", &values![&x]) }?;
/// assert_eq!((results.len(), x.to_vec::<f32>()?), (1, vec![0.0, 2.0]));
/// # distgrad::Result::Ok(())
/// ```
///
/// # Safety
/// As for [`op_unchecked`].
pub unsafe fn ops_unchecked(name: &str, arguments: &[Value<'_>]) -> Result<Vec<Value<'static>>> {
    take_values(with_raw(arguments, |arguments| raw::op_call(name, arguments))?)
}

/// Runs an operator of the table in ops.rs.
pub(crate) fn op_of_table(name: &'static str, arguments: &[Value<'_>]) -> Result<Tensor> {
    // SAFETY: they only compute; a test asks about each.
    unsafe { op_unchecked(name, arguments) }
}

// Numbers of any kind stand behind a semicolon.
macro_rules! in_place {
    ($(
        $doc:literal $name:ident($($argument:ident: $type:ty),* $(; $($number:ident),+)?)
        = $op:literal;
    )*) => {
        impl Tensor {$(
            #[doc = concat!($doc, ", in place: `", $op, "`.")]
            ///
            /// # Safety
            /// While it runs no other thread reads or writes this tensor's memory, also not through
            /// another tensor that shares it ([`Tensor::detach`], views, messages in flight).
            #[doc(alias = $op)]
            pub unsafe fn $name(
                &self $(, $argument: $type)* $($(, $number: impl Into<Scalar>)+)?
            ) -> Result<Tensor> {
                let arguments = [
                    Value::from(self) $(, Value::from($argument))*
                    $($(, Value::from(Into::<Scalar>::into($number)))+)?
                ];
                // SAFETY: the caller's promise.
                unsafe { op_unchecked($op, &arguments) }
            }
        )*}

        /// The operators in place that are methods of [`Tensor`], for its tests.
        #[doc(hidden)]
        pub const OPERATORS_IN_PLACE: &[&str] = &[$($op),*];
    };
}
in_place! {
    "Copies the elements of another" copy_(source: &Tensor) = "aten::copy_";
    "Sets every element to 0" zero_() = "aten::zero_";
    "Sets every element to `value`" fill_(; value) = "aten::fill_.Scalar";
    "Multiplies each by a number" mul_(; other) = "aten::mul_.Scalar";
    "Sets each to a random number, uniform between two"
        uniform_(from: f64, to: f64) = "aten::uniform_";
    "Sets each to a random number, normally distributed"
        normal_(mean: f64, deviation: f64) = "aten::normal_";
    "Adds `scale` times another" add_(other: &Tensor; scale) = "aten::add_.Tensor";
}
