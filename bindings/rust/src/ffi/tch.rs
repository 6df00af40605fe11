//! The feature `tch`: tensors of tch, which are the same `at::Tensor`s.
use crate::{Code, Error, Result, Tensor};
use std::{ffi::c_void, sync::OnceLock};

/// The libtorch that the version of tch in Cargo.toml is made for.
const TORCH_OF_TCH: &str = "2.11.0";

/// Checks that tensors of a tch made for one libtorch are those of a distgrad built with another:
/// they are if both are of one version, and one copy of it is loaded.
#[doc(hidden)]
pub fn check_one_libtorch(of_tch: &str, of_distgrad: &str, one_copy: bool) -> Result<()> {
    let version = |text: &str| text.split('+').next().unwrap_or("").to_owned();
    if version(of_tch) == version(of_distgrad) && one_copy {
        return Ok(());
    }
    let what = if version(of_tch) == version(of_distgrad) {
        "and another copy of it than tch has is loaded for it"
    } else {
        "so their tensors are not the same"
    };
    Err(Error::new(
        Code::FailedPrecondition,
        format!(
            "tch is made for libtorch {of_tch}, and distgrad is built with libtorch {of_distgrad}, \
             {what}; build both with the same LIBTORCH"
        ),
    ))
}

/// Returns the address of a tensor's class, which is in the libtorch that made it.
unsafe fn class_of(tensor: *const c_void) -> *const c_void {
    // SAFETY: an `at::Tensor` is a pointer to its implementation, in any version, which is a class
    // with virtual functions, and so begins with the pointer to their table.
    unsafe { **tensor.cast::<*const *const c_void>() }
}

/// Checks once, before the first tensor crosses.
fn check() -> Result<()> {
    static CHECKED: OnceLock<Result<()>> = OnceLock::new();
    CHECKED
        .get_or_init(|| {
            let ours = Tensor::from_slice(&[0.0f32], &[1])?;
            let theirs = tch::Tensor::from_slice(&[0.0f32]);
            // SAFETY: both live until the end of this.
            let one_copy =
                unsafe { class_of(ours.as_torch_ptr()) == class_of(theirs.as_ptr().cast()) };
            check_one_libtorch(TORCH_OF_TCH, crate::torch_version(), one_copy)
        })
        .clone()
}

/// Creates one more reference, which shares memory and autograd history.
///
/// `Code::FailedPrecondition` if tch and distgrad are built with two versions of libtorch.
impl TryFrom<&tch::Tensor> for Tensor {
    type Error = crate::Error;

    fn try_from(tensor: &tch::Tensor) -> Result<Self> {
        check()?;
        // SAFETY: "creates a handle for a `const at::Tensor *`": tch's pointer is one, alive while `tensor`
        // is; and both have one libtorch.
        unsafe { Tensor::from_torch_ptr(tensor.as_ptr().cast()) }
    }
}

/// Creates one more reference, which shares memory and autograd history. tch's in-place operators are
/// safe functions: as between tch's own shallow clones, it is up to the program not to run one while
/// another thread uses the tensor.
///
/// # Panics
/// If tch and distgrad are built with two versions of libtorch.
impl From<&Tensor> for tch::Tensor {
    fn from(tensor: &Tensor) -> Self {
        if let Err(error) = check() {
            panic!("{error}");
        }
        // SAFETY: "the `at::Tensor *` of a handle, which lives as long as the handle": until after
        // clone_from_ptr has made another reference; and both have one libtorch.
        unsafe { tch::Tensor::clone_from_ptr(tensor.as_torch_ptr().cast()) }
    }
}
