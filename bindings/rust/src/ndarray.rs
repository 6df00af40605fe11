//! The feature `ndarray`: conversions between arrays and tensors.
use crate::{Element, Error, Result, Tensor};
use ndarray::{Array, ArrayBase, ArrayD, Data, Dimension, IxDyn};

fn shape_of(dims: &[usize]) -> Vec<i64> {
    dims.iter().map(|&size| size as i64).collect()
}

/// Copies the elements of an array or a view, in row-major order.
impl<S: Data<Elem: Element>, D: Dimension> TryFrom<&ArrayBase<S, D>> for Tensor {
    type Error = Error;

    fn try_from(array: &ArrayBase<S, D>) -> Result<Self> {
        Tensor::from_vec(array.iter().copied().collect(), &shape_of(array.shape()))
    }
}

/// Takes the array's memory without a copy, if it is in row-major order and fills its memory;
/// copies it otherwise.
impl<T: Element, D: Dimension> TryFrom<Array<T, D>> for Tensor {
    type Error = Error;

    fn try_from(array: Array<T, D>) -> Result<Self> {
        if !array.is_standard_layout() {
            return Tensor::try_from(&array);
        }
        let (shape, count) = (shape_of(array.shape()), array.len());
        match array.into_raw_vec_and_offset() {
            (data, None | Some(0)) if data.len() == count => Tensor::from_vec(data, &shape),
            (data, offset) => {
                let start = offset.unwrap_or(0);
                Tensor::from_slice(&data[start..start + count], &shape)
            }
        }
    }
}

/// Copies the elements; errors as of [`Tensor::to_vec`].
impl<T: Element> TryFrom<&Tensor> for ArrayD<T> {
    type Error = Error;

    fn try_from(tensor: &Tensor) -> Result<Self> {
        let shape: Vec<usize> = tensor.shape().iter().map(|&size| size as usize).collect();
        ArrayD::from_shape_vec(IxDyn(&shape), tensor.to_vec()?)
            .map_err(|error| Error::invalid(error.to_string()))
    }
}
