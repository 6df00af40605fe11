//! Typed methods for operators that are used a lot, generated from the table below.
use crate::{ffi::op_of_table, op, ops, Dtype, Error, Result, Scalar, Tensor, Value};

// Numbers of any kind stand behind a semicolon.
macro_rules! operators {
    ($(
        $doc:literal $name:ident($($argument:ident: $type:ty),* $(; $($number:ident),+)?)
        = $op:literal;
    )*) => {
        impl Tensor {$(
            #[doc = concat!($doc, ": `", $op, "`.")]
            #[doc(alias = $op)]
            pub fn $name(
                &self $(, $argument: $type)* $($(, $number: impl Into<Scalar>)+)?
            ) -> Result<Tensor> {
                op_of_table($op, &[
                    Value::from(self) $(, Value::from($argument))*
                    $($(, Value::from(Into::<Scalar>::into($number)))+)?
                ])
            }
        )*}

        /// The operators that are methods of [`Tensor`], for its tests.
        #[doc(hidden)]
        pub const OPERATORS: &[&str] = &[$($op),*];
    };
}
operators! {
    "Sum of two" add(other: &Tensor) = "aten::add.Tensor";
    "Each plus a number" add_scalar(; other) = "aten::add.Scalar";
    "Difference of two" sub(other: &Tensor) = "aten::sub.Tensor";
    "Each minus a number" sub_scalar(; other) = "aten::sub.Scalar";
    "Product, element by element" mul(other: &Tensor) = "aten::mul.Tensor";
    "Each times a number" mul_scalar(; other) = "aten::mul.Scalar";
    "Quotient, element by element" div(other: &Tensor) = "aten::div.Tensor";
    "Each divided by a number" div_scalar(; other) = "aten::div.Scalar";
    "Each to the power of a number" pow(; exponent) = "aten::pow.Tensor_Scalar";
    "Minus each" neg() = "aten::neg";
    "Absolute values" abs() = "aten::abs";
    "e to the power of each" exp() = "aten::exp";
    "Natural logarithms" log() = "aten::log";
    "Square roots" sqrt() = "aten::sqrt";
    "Sines" sin() = "aten::sin";
    "Cosines" cos() = "aten::cos";
    "Squares" square() = "aten::square";
    "The larger of each and 0" relu() = "aten::relu";
    "Gaussian error linear units" gelu() = "aten::gelu";
    "x times the sigmoid of x" silu() = "aten::silu";
    "Each, but negative ones times `slope`" leaky_relu(slope: f64) = "aten::leaky_relu";
    "1 / (1 + exp(-x))" sigmoid() = "aten::sigmoid";
    "Hyperbolic tangents" tanh() = "aten::tanh";
    "Exponentials along `dim`, scaled to the sum 1" softmax(dim: i64) = "aten::softmax.int";
    "Logarithms of softmax" log_softmax(dim: i64) = "aten::log_softmax.int";
    "Each, limited to `min` and `max`" clamp(; min, max) = "aten::clamp";
    "The larger of two" maximum(other: &Tensor) = "aten::maximum";
    "The smaller of two" minimum(other: &Tensor) = "aten::minimum";
    "`value` where `mask` is true"
        masked_fill(mask: &Tensor; value) = "aten::masked_fill.Scalar";

    "Product of matrices, batched ones too" matmul(other: &Tensor) = "aten::matmul";
    "Products of `[n, a, b]` and `[n, b, c]`" bmm(other: &Tensor) = "aten::bmm";
    "`[n, in]` by a weight `[out, in]`, plus a bias `[out]`"
        linear(weight: &Tensor, bias: Option<&Tensor>) = "aten::linear";
    "`[n, in, h, w]` by a weight `[out, in, kh, kw]`, plus a bias `[out]`"
        conv2d(weight: &Tensor, bias: Option<&Tensor>, stride: [i64; 2], padding: [i64; 2])
        = "aten::conv2d";
    "The largest element of each window" max_pool2d(kernel: [i64; 2]) = "aten::max_pool2d";
    "The mean of each of as many parts as `[h, w]`" adaptive_avg_pool2d(size: [i64; 2])
        = "aten::adaptive_avg_pool2d";
    "Rows of a table `[n, size]`, one for each index (int64)" embedding(indices: &Tensor)
        = "aten::embedding";
    "Attention of queries `[n, heads, length, size]` (Vaswani and others, arXiv:1706.03762)"
        scaled_dot_product_attention(keys: &Tensor, values: &Tensor)
        = "aten::scaled_dot_product_attention";
    "The elements at `index` along `dim`, which has the shape of the result"
        gather(dim: i64, index: &Tensor)
        = "aten::gather";
    "The slices at `index` (one dimension) along `dim`" index_select(dim: i64, index: &Tensor)
        = "aten::index_select";
    "Scaled to mean 0 and deviation 1 over the last dimensions, `shape`"
        layer_norm(shape: &[i64], weight: Option<&Tensor>, bias: Option<&Tensor>)
        = "aten::layer_norm";
    "Each, or 0 with probability `p` if `train`, scaled to keep the mean"
        dropout(p: f64, train: bool) = "aten::dropout";

    "Sum of all elements" sum() = "aten::sum";
    "Sum along `dims`; `keep` leaves them with size 1"
        sum_dims(dims: &[i64], keep: bool) = "aten::sum.dim_IntList";
    "Mean of all elements" mean() = "aten::mean";
    "Mean along `dims`; `keep` leaves them with size 1"
        mean_dims(dims: &[i64], keep: bool) = "aten::mean.dim";
    "The 2-norm of all elements" norm() = "aten::norm.Scalar";
    "Cumulative sums along `dim`" cumsum(dim: i64) = "aten::cumsum";
    "log(sum(exp(x))) along `dims`" logsumexp(dims: &[i64], keep: bool) = "aten::logsumexp";
    "The largest element" max() = "aten::max";
    "The smallest element" min() = "aten::min";
    "The index of the largest along `dim`" argmax(dim: i64) = "aten::argmax";
    "Scores `[n, classes]` against labels `[n]` (int64); the mean over n"
        cross_entropy_loss(labels: &Tensor) = "aten::cross_entropy_loss";
    "Log-probabilities `[n, classes]` against labels `[n]` (int64); the mean over n"
        nll_loss(labels: &Tensor) = "aten::nll_loss";
    "The mean of squared differences" mse_loss(other: &Tensor) = "aten::mse_loss";
    "The mean of absolute differences" l1_loss(other: &Tensor) = "aten::l1_loss";
    "Scores against probabilities of the same shape; the mean"
        binary_cross_entropy_with_logits(targets: &Tensor)
        = "aten::binary_cross_entropy_with_logits";
    "Whether equal, element by element" eq(other: &Tensor) = "aten::eq.Tensor";
    "Whether greater, element by element" gt(other: &Tensor) = "aten::gt.Tensor";
    "Whether less, element by element" lt(other: &Tensor) = "aten::lt.Tensor";

    "Another shape, in the same order" reshape(shape: &[i64]) = "aten::reshape";
    "Another shape of the same memory" view(shape: &[i64]) = "aten::view";
    "Dimensions of size 1 expanded, without a copy" expand(shape: &[i64])
        = "aten::expand";
    "The dimensions in another order" permute(dims: &[i64]) = "aten::permute";
    "Reversed along `dims`" flip(dims: &[i64]) = "aten::flip";
    "0 above the diagonal" tril() = "aten::tril";
    "Dimensions `start` to `end` as one" flatten(start: i64, end: i64) = "aten::flatten.using_ints";
    "Two dimensions swapped" transpose(first: i64, second: i64) = "aten::transpose.int";
    "One more dimension, of size 1, at `dim`" unsqueeze(dim: i64) = "aten::unsqueeze";
    "Without `dim`, if its size is 1" squeeze(dim: i64) = "aten::squeeze.dim";
    "A view of `length` elements along `dim`, from `start` on"
        narrow(dim: i64, start: i64, length: i64) = "aten::narrow";
    "The slice at `index` along `dim`, without that dimension"
        select(dim: i64, index: i64) = "aten::select.int";
    "Elements of another type" to_dtype(dtype: Dtype) = "aten::to.dtype";
    "Row-major in memory, by a copy if it is not" contiguous() = "aten::contiguous";
    "Zeros, of the same shape and type" zeros_like() = "aten::zeros_like";
    "A copy with memory of its own" copy() = "aten::clone";
}

/// Runs an operator that has two results.
fn pair(name: &str, arguments: &[Value<'_>]) -> Result<(Tensor, Tensor)> {
    let mut results = ops(name, arguments)?.into_iter().map(Tensor::try_from);
    match (results.next(), results.next(), results.next()) {
        (Some(first), Some(second), None) => Ok((first?, second?)),
        _ => Err(Error::invalid(format!("{name} has not two results"))),
    }
}

/// Runs an operator whose result is a list.
fn list(name: &str, arguments: &[Value<'_>]) -> Result<Vec<Tensor>> {
    match ops(name, arguments)?.pop() {
        Some(value) => value.try_into(),
        None => Err(Error::invalid(format!("{name} has no results"))),
    }
}

/// Operators with several results.
impl Tensor {
    /// The largest along `dim`, and their indices: `aten::max.dim`.
    #[doc(alias = "aten::max.dim")]
    pub fn max_dim(&self, dim: i64, keep: bool) -> Result<(Tensor, Tensor)> {
        pair("aten::max.dim", &[self.into(), dim.into(), keep.into()])
    }
    /// Sorted along `dim`, and the indices before: `aten::sort`.
    #[doc(alias = "aten::sort")]
    pub fn sort(&self, dim: i64, descending: bool) -> Result<(Tensor, Tensor)> {
        pair("aten::sort", &[self.into(), dim.into(), descending.into()])
    }
    /// The `k` largest along `dim`, and their indices: `aten::topk`.
    ///
    /// ```
    /// let x = distgrad::Tensor::from_slice(&[3.0f32, 1.0, 2.0], &[3])?;
    /// let (largest, places) = x.topk(2, 0)?;
    /// assert_eq!(largest.to_vec::<f32>()?, [3.0, 2.0]);
    /// assert_eq!(places.to_vec::<i64>()?, [0, 2]);
    /// # distgrad::Result::Ok(())
    /// ```
    #[doc(alias = "aten::topk")]
    pub fn topk(&self, k: i64, dim: i64) -> Result<(Tensor, Tensor)> {
        pair("aten::topk", &[self.into(), k.into(), dim.into()])
    }
    /// Parts of `size` along `dim`; the last may be smaller: `aten::split.Tensor`.
    #[doc(alias = "aten::split.Tensor")]
    pub fn split(&self, size: i64, dim: i64) -> Result<Vec<Tensor>> {
        list("aten::split.Tensor", &[self.into(), size.into(), dim.into()])
    }
    /// At most `count` parts along `dim`, of one size but for the last: `aten::chunk`.
    #[doc(alias = "aten::chunk")]
    pub fn chunk(&self, count: i64, dim: i64) -> Result<Vec<Tensor>> {
        list("aten::chunk", &[self.into(), count.into(), dim.into()])
    }
}

/// Operators that take no tensor, or a list of them.
impl Tensor {
    /// A tensor of zeros: `aten::zeros`.
    #[doc(alias = "aten::zeros")]
    pub fn zeros(shape: &[i64], dtype: Dtype) -> Result<Tensor> {
        op("aten::zeros", &[shape.into(), dtype.into()])
    }
    /// A tensor of ones: `aten::ones`.
    #[doc(alias = "aten::ones")]
    pub fn ones(shape: &[i64], dtype: Dtype) -> Result<Tensor> {
        op("aten::ones", &[shape.into(), dtype.into()])
    }
    /// A tensor of one value: `aten::full`.
    #[doc(alias = "aten::full")]
    pub fn full(shape: &[i64], value: impl Into<Scalar>, dtype: Dtype) -> Result<Tensor> {
        op("aten::full", &[shape.into(), value.into().into(), dtype.into()])
    }
    /// The integers from 0 to `end` - 1, of int64: `aten::arange`.
    #[doc(alias = "aten::arange")]
    pub fn arange(end: i64) -> Result<Tensor> {
        op("aten::arange", &[end.into()])
    }
    /// Random numbers, normally distributed with mean 0 and deviation 1, of float32: `aten::randn`.
    #[doc(alias = "aten::randn")]
    pub fn randn(shape: &[i64]) -> Result<Tensor> {
        op("aten::randn", &[shape.into()])
    }
    /// Random numbers, uniform in [0, 1), of float32: `aten::rand`.
    #[doc(alias = "aten::rand")]
    pub fn rand(shape: &[i64]) -> Result<Tensor> {
        op("aten::rand", &[shape.into()])
    }
    /// Elements of `a` where `condition` is true, else of `b`: `aten::where.self`.
    #[doc(alias = "aten::where.self")]
    pub fn choose(condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        op("aten::where.self", &[condition.into(), a.into(), b.into()])
    }
    /// Tensors concatenated along `dim`: `aten::cat`.
    #[doc(alias = "aten::cat")]
    pub fn cat(tensors: &[&Tensor], dim: i64) -> Result<Tensor> {
        op("aten::cat", &[tensors.into(), dim.into()])
    }
    /// Tensors concatenated along a new dimension `dim`: `aten::stack`.
    ///
    /// ```
    /// use distgrad::{Dtype, Tensor};
    /// let (a, b) = (Tensor::zeros(&[2, 3], Dtype::FLOAT32)?, Tensor::ones(&[2, 3], Dtype::FLOAT32)?);
    /// assert_eq!(Tensor::stack(&[&a, &b], 0)?.shape(), [2, 2, 3]);
    /// assert_eq!(Tensor::cat(&[&a, &b], 0)?.shape(), [4, 3]);
    /// # distgrad::Result::Ok(())
    /// ```
    #[doc(alias = "aten::stack")]
    pub fn stack(tensors: &[&Tensor], dim: i64) -> Result<Tensor> {
        op("aten::stack", &[tensors.into(), dim.into()])
    }
}
