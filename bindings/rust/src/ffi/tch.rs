//! The feature `tch`: tensors of tch, which are the same `at::Tensor`s.
use crate::{Result, Tensor};

/// One more reference: memory and history are shared, nothing is copied.
impl TryFrom<&tch::Tensor> for Tensor {
    type Error = crate::Error;

    fn try_from(tensor: &tch::Tensor) -> Result<Self> {
        // SAFETY: "a handle of an `const at::Tensor *`": tch's pointer is one, alive while `tensor`
        // is; build.rs of both crates has linked one libtorch.
        unsafe { Tensor::from_torch_ptr(tensor.as_ptr().cast()) }
    }
}

/// One more reference: memory and history are shared, nothing is copied.
impl From<&Tensor> for tch::Tensor {
    fn from(tensor: &Tensor) -> Self {
        // SAFETY: "the `at::Tensor *` of a handle, which lives as long as the handle": until after
        // clone_from_ptr has made another reference.
        unsafe { tch::Tensor::clone_from_ptr(tensor.as_torch_ptr().cast()) }
    }
}
