//! The feature ndarray.
#![cfg(feature = "ndarray")]
use distgrad::{Code, Tensor};
use ndarray::{array, s, Array2, ArrayD};

#[test]
fn arrays_in_and_out() {
    let array: Array2<f32> = array![[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]];
    let tensor = Tensor::try_from(&array).unwrap();
    assert_eq!(tensor.shape(), [2, 3]);
    assert_eq!(ArrayD::<f32>::try_from(&tensor).unwrap(), array.clone().into_dyn());
    // Views and columns first, whatever lies in memory.
    let turned = Tensor::try_from(&array.t()).unwrap();
    assert_eq!(turned.to_vec::<f32>().unwrap(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    let part = array.slice(s![.., 1..]).to_owned();
    assert_eq!(Tensor::try_from(part).unwrap().to_vec::<f32>().unwrap(), [2.0, 3.0, 5.0, 6.0]);
    let back = ArrayD::<f32>::try_from(&tensor.transpose(0, 1).unwrap()).unwrap();
    assert_eq!(back, array.t().into_dyn());

    let wrong = ArrayD::<f64>::try_from(&tensor).unwrap_err();
    assert_eq!(wrong.code(), Code::InvalidArgument);
}

#[test]
fn an_array_is_not_copied_if_it_need_not_be() {
    let array: Array2<i64> = array![[1, 2], [3, 4]];
    let address = array.as_ptr();
    let tensor = Tensor::try_from(array).unwrap();
    // SAFETY: nothing writes here.
    assert_eq!(unsafe { tensor.as_slice::<i64>() }.unwrap().as_ptr(), address);
    // One that does not begin where its memory does, and one with columns first.
    let mut rest: Array2<i64> = array![[1, 2], [3, 4], [5, 6]];
    rest.slice_collapse(s![1.., ..]);
    assert_eq!(Tensor::try_from(rest).unwrap().to_vec::<i64>().unwrap(), [3, 4, 5, 6]);
    let turned = array![[1i64, 2], [3, 4]].reversed_axes();
    assert_eq!(Tensor::try_from(turned).unwrap().to_vec::<i64>().unwrap(), [1, 3, 2, 4]);
    let empty = Array2::<f32>::zeros((0, 3));
    assert_eq!(Tensor::try_from(empty).unwrap().shape(), [0, 3]);
}
