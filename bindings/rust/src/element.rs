//! Types of elements.
use std::fmt;

/// The type of a tensor's elements, by torch's number. For operators it is an integer.
///
/// ```
/// use distgrad::{Dtype, Element, Tensor};
/// let x = Tensor::from_slice(&[1u8, 2, 3], &[3])?;
/// assert_eq!(x.dtype(), u8::DTYPE);
/// let y = x.to_dtype(Dtype::FLOAT32)?;
/// assert_eq!(y.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_dtype")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtype(i32);

macro_rules! dtypes {
    ($($name:ident = $code:literal, $text:literal, $doc:literal;)*) => {
        impl Dtype {
            $(#[doc = $doc] pub const $name: Self = Self($code);)*
        }
        impl fmt::Display for Dtype {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    $($code => f.write_str($text),)*
                    other => write!(f, "dtype {other}"),
                }
            }
        }
    };
}
dtypes! {
    UINT8 = 0, "uint8", "`u8`";
    INT8 = 1, "int8", "`i8`";
    INT16 = 2, "int16", "`i16`";
    INT32 = 3, "int32", "`i32`";
    INT64 = 4, "int64", "`i64`";
    FLOAT16 = 5, "float16", "IEEE's half precision";
    FLOAT32 = 6, "float32", "`f32`";
    FLOAT64 = 7, "float64", "`f64`";
    COMPLEX32 = 8, "complex32", "two `FLOAT16`";
    COMPLEX64 = 9, "complex64", "two `f32`";
    COMPLEX128 = 10, "complex128", "two `f64`";
    BOOL = 11, "bool", "a byte, 0 or 1";
    BFLOAT16 = 15, "bfloat16", "the upper half of an `f32`";
    FLOAT8_E5M2 = 23, "float8_e5m2", "a byte, five bits of it exponent";
    FLOAT8_E4M3FN = 24, "float8_e4m3fn", "a byte, four bits of it exponent; no infinities";
    UINT16 = 27, "uint16", "`u16`";
    UINT32 = 28, "uint32", "`u32`";
    UINT64 = 29, "uint64", "`u64`";
}

impl Dtype {
    pub(crate) fn from_code(code: i32) -> Self {
        Self(code)
    }
    /// Returns torch's number.
    pub fn code(self) -> i32 {
        self.0
    }
}

impl fmt::Debug for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is the type of a tensor's elements. Any bits are a value of it, which is why
/// `bool` is not one.
///
/// ```
/// use distgrad::{Dtype, Element, Tensor};
/// fn mean<T: Element>(elements: &[T]) -> distgrad::Result<f64> {
///     let x = Tensor::from_slice(elements, &[elements.len() as i64])?;
///     x.to_dtype(Dtype::FLOAT64)?.mean()?.item()
/// }
/// assert_eq!(mean(&[1.0f32, 2.0])?, 1.5);
/// assert_eq!(mean(&[1u8, 2])?, 1.5);
/// # distgrad::Result::Ok(())
/// ```
pub trait Element: sealed::Sealed + Copy + Send + 'static {
    /// torch's dtype for it.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($name:ty = $dtype:ident;)*) => {$(
        impl sealed::Sealed for $name {}
        impl Element for $name {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}
elements! {
    u8 = UINT8;
    i8 = INT8;
    i16 = INT16;
    i32 = INT32;
    i64 = INT64;
    f32 = FLOAT32;
    f64 = FLOAT64;
    u16 = UINT16;
    u32 = UINT32;
    u64 = UINT64;
}
