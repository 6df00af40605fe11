//! Typed methods for operators that are used a lot, generated from the table below.
use crate::{op, Dtype, Result, Tensor, Value};

macro_rules! operators {
    ($($doc:literal $name:ident($($argument:ident: $type:ty),*) = $op:literal $(, $trailing:expr)*;)*) => {
        impl Tensor {$(
            #[doc = concat!($doc, ": `", $op, "`.")]
            #[doc(alias = $op)]
            pub fn $name(&self $(, $argument: $type)*) -> Result<Tensor> {
                op($op, &[Value::from(self) $(, Value::from($argument))* $(, Value::from($trailing))*])
            }
        )*}

        /// The operators that are methods of [`Tensor`], for its tests.
        #[doc(hidden)]
        pub const OPERATORS: &[&str] = &[$($op),*];
    };
}
operators! {
    "Sum of two" add(other: &Tensor) = "aten::add.Tensor";
    "Each plus a number" add_scalar(other: f64) = "aten::add.Scalar";
    "Difference of two" sub(other: &Tensor) = "aten::sub.Tensor";
    "Each minus a number" sub_scalar(other: f64) = "aten::sub.Scalar";
    "Product, element by element" mul(other: &Tensor) = "aten::mul.Tensor";
    "Each times a number" mul_scalar(other: f64) = "aten::mul.Scalar";
    "Quotient, element by element" div(other: &Tensor) = "aten::div.Tensor";
    "Each divided by a number" div_scalar(other: f64) = "aten::div.Scalar";
    "Each to the power of a number" pow(exponent: f64) = "aten::pow.Tensor_Scalar";
    "Minus each" neg() = "aten::neg";
    "Absolute values" abs() = "aten::abs";
    "e to the power of each" exp() = "aten::exp";
    "Natural logarithms" log() = "aten::log";
    "Square roots" sqrt() = "aten::sqrt";
    "Squares" square() = "aten::square";
    "Negative ones become 0" relu() = "aten::relu";
    "Gaussian error linear units" gelu() = "aten::gelu";
    "1 / (1 + exp(-x))" sigmoid() = "aten::sigmoid";
    "Hyperbolic tangents" tanh() = "aten::tanh";
    "Along `dim` positive and 1 together" softmax(dim: i64) = "aten::softmax.int";
    "Logarithms of softmax" log_softmax(dim: i64) = "aten::log_softmax.int";
    "Within bounds" clamp(min: f64, max: f64) = "aten::clamp";

    "Product of matrices, batched ones too" matmul(other: &Tensor) = "aten::matmul";
    "`[n, in]` by a weight `[out, in]`, plus a bias `[out]`"
        linear(weight: &Tensor, bias: Option<&Tensor>) = "aten::linear";
    "`[n, in, h, w]` by a weight `[out, in, kh, kw]`, plus a bias `[out]`"
        conv2d(weight: &Tensor, bias: Option<&Tensor>, stride: [i64; 2], padding: [i64; 2])
        = "aten::conv2d";
    "The largest of each window" max_pool2d(kernel: [i64; 2]) = "aten::max_pool2d";
    "Rows of a table `[n, size]`, by indices" index_select(dim: i64, index: &Tensor)
        = "aten::index_select";
    "Scaled to deviation 1 about mean 0 over the last dimensions"
        layer_norm(shape: &[i64], weight: Option<&Tensor>, bias: Option<&Tensor>)
        = "aten::layer_norm";
    "Some become 0 while training, at random" dropout(p: f64, train: bool) = "aten::dropout";

    "Of all elements" sum() = "aten::sum";
    "Along `dims`" sum_dims(dims: &[i64], keep: bool) = "aten::sum.dim_IntList";
    "Of all elements" mean() = "aten::mean";
    "Along `dims`" mean_dims(dims: &[i64], keep: bool) = "aten::mean.dim";
    "The largest" max() = "aten::max";
    "The smallest" min() = "aten::min";
    "Where the largest is along `dim`" argmax(dim: i64) = "aten::argmax";
    "Scores `[n, classes]` against labels `[n]` (int64); the mean over n"
        cross_entropy_loss(labels: &Tensor) = "aten::cross_entropy_loss";
    "Log-probabilities `[n, classes]` against labels `[n]` (int64); the mean over n"
        nll_loss(labels: &Tensor) = "aten::nll_loss";
    "The mean of squared differences" mse_loss(other: &Tensor) = "aten::mse_loss";
    "Whether equal, element by element" eq(other: &Tensor) = "aten::eq.Tensor";

    "Another shape, in the same order" reshape(shape: &[i64]) = "aten::reshape";
    "Dimensions `start` to `end` as one" flatten(start: i64, end: i64) = "aten::flatten.using_ints";
    "Two dimensions change places" transpose(first: i64, second: i64) = "aten::transpose.int";
    "A dimension of size 1 more" unsqueeze(dim: i64) = "aten::unsqueeze";
    "Without `dim`, if its size is 1" squeeze(dim: i64) = "aten::squeeze.dim";
    "`length` of `dim`, from `start` on" narrow(dim: i64, start: i64, length: i64) = "aten::narrow";
    "One of `dim`, without that dimension" select(dim: i64, index: i64) = "aten::select.int";
    "Elements of another type" to_dtype(dtype: Dtype) = "aten::to.dtype";
    "Row-major, by a copy if it is not" contiguous() = "aten::contiguous";
    "A copy with memory of its own" copy() = "aten::clone";

    "Takes the elements of another, in place" copy_(source: &Tensor) = "aten::copy_";
    "Every element becomes 0, in place" zero_() = "aten::zero_";
    "Adds `scale` times another, in place" add_(other: &Tensor, scale: f64) = "aten::add_.Tensor";
}

/// Those that take no tensor, or a list of them.
impl Tensor {
    /// Of zeros: `aten::zeros`.
    #[doc(alias = "aten::zeros")]
    pub fn zeros(shape: &[i64], dtype: Dtype) -> Result<Tensor> {
        op("aten::zeros", &[shape.into(), dtype.into()])
    }
    /// Of ones: `aten::ones`.
    #[doc(alias = "aten::ones")]
    pub fn ones(shape: &[i64], dtype: Dtype) -> Result<Tensor> {
        op("aten::ones", &[shape.into(), dtype.into()])
    }
    /// Random, with mean 0 and deviation 1, of float32: `aten::randn`.
    #[doc(alias = "aten::randn")]
    pub fn randn(shape: &[i64]) -> Result<Tensor> {
        op("aten::randn", &[shape.into()])
    }
    /// One after the other along `dim`: `aten::cat`.
    #[doc(alias = "aten::cat")]
    pub fn cat(tensors: &[&Tensor], dim: i64) -> Result<Tensor> {
        op("aten::cat", &[tensors.into(), dim.into()])
    }
    /// One after the other along a new dimension: `aten::stack`.
    #[doc(alias = "aten::stack")]
    pub fn stack(tensors: &[&Tensor], dim: i64) -> Result<Tensor> {
        op("aten::stack", &[tensors.into(), dim.into()])
    }
}
