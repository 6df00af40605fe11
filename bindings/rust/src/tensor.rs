//! Tensors: references to torch's.
use crate::{
    ffi::{self, Handle, Owned, TensorHandle},
    Dtype, Element, Error, Result,
};
use std::{
    cell::{Cell, RefCell},
    fmt,
    rc::Rc,
};

/// A reference to a torch tensor; a clone refers to the same one.
///
/// Elements come in by [`from_slice`](Tensor::from_slice) and [`from_vec`](Tensor::from_vec), and go
/// out by [`to_vec`](Tensor::to_vec) and [`item`](Tensor::item). Operators that are used a lot are
/// methods, [`op`](crate::op) runs any other.
///
/// ```
/// use distgrad::Tensor;
/// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// let sums = x.matmul(&x)?.sum_dims(&[1], false)?;
/// assert_eq!(sums.shape(), [2]);
/// assert_eq!(sums.to_vec::<f32>()?, [17.0, 37.0]);
/// # distgrad::Result::Ok(())
/// ```
///
/// Any thread may use it. Operators that write in place (torch's names for them end in `_`) are
/// `unsafe`, for nothing orders them with what other threads do with the same memory:
///
/// ```compile_fail,E0133
/// let x = distgrad::Tensor::from_slice(&[1.0f32], &[1])?;
/// x.zero_()?;
/// # distgrad::Result::Ok(())
/// ```
///
/// Some safe functions write to the elements of tensors, too: a step of an optimizer (its
/// parameters), a load of a file into tensors, and of a checkpoint (the tensors of the parts), an
/// average and a broadcast of a [`ProcessGroup`](crate::ProcessGroup), an
/// [`GradientAverager`](crate::GradientAverager) (parameters and buffers), and a forward of a
/// [`DataParallel`](crate::DataParallel) (its buffers). As everywhere in torch, it is up to the
/// program that no other thread uses these tensors meanwhile. Above all not tensors of integers:
/// where they are indices ([`gather`](Tensor::gather), [`index_select`](Tensor::index_select), the
/// labels of a loss, what a backward has saved of them), an operator looks whether they are in
/// range, reads them again, and goes where they say by then, also outside of a tensor's memory. Nor
/// may they be the indices of a sparse tensor, which are looked at when it is made. On one thread a
/// backward notices what was written to the indices that it has saved, and is an error.
#[doc(alias = "dg_tensor")]
pub struct Tensor(Owned<TensorHandle>);

impl Tensor {
    pub(crate) fn own(handle: TensorHandle) -> Self {
        Self(Owned::new(handle))
    }
    pub(crate) fn handle(&self) -> TensorHandle {
        self.0.get()
    }
    pub(crate) fn release(self) -> TensorHandle {
        self.0.release()
    }
    /// Owns a handle; a null one is no tensor.
    pub(crate) fn own_or_none(handle: TensorHandle) -> Option<Self> {
        (!handle.is_null()).then(|| Self::own(handle))
    }
    pub(crate) fn handle_or_null(tensor: Option<&Self>) -> TensorHandle {
        tensor.map_or(TensorHandle::NULL, Self::handle)
    }
    /// Creates one more reference to a tensor that somebody else owns.
    pub(crate) fn share(handle: TensorHandle) -> Result<Option<Self>> {
        if handle.is_null() {
            return Ok(None);
        }
        Ok(Some(Self::own(ffi::tensor_clone(handle)?)))
    }

    /// Creates a tensor of no dimensions on the CPU.
    pub fn from_scalar<T: Element>(value: T) -> Result<Self> {
        Self::from_slice(&[value], &[])
    }

    /// Returns the only element.
    ///
    /// `Code::InvalidArgument` if it has not one element, or of another dtype; else errors as of
    /// [`to_vec`](Tensor::to_vec).
    pub fn item<T: Element>(&self) -> Result<T> {
        match self.to_vec::<T>()?[..] {
            [element] => Ok(element),
            ref all => {
                Err(Error::invalid(format!("the tensor has {} elements, not one", all.len())))
            }
        }
    }

    /// Returns the type of its elements.
    #[doc(alias = "dg_tensor_dtype")]
    pub fn dtype(&self) -> Dtype {
        Dtype::from_code(ffi::tensor_dtype(self.handle()))
    }

    /// Returns the size of each dimension; -1 where the parts of a nested tensor differ.
    #[doc(alias = "dg_tensor_layout")]
    #[doc(alias = "dg_tensor_dim_count")]
    pub fn shape(&self) -> Vec<i64> {
        ffi::tensor_layout(self.handle(), true).unwrap_or_default()
    }

    /// Returns the stride of each dimension, in elements; empty for a sparse or nested tensor.
    #[doc(alias = "dg_tensor_layout")]
    pub fn strides(&self) -> Vec<i64> {
        ffi::tensor_layout(self.handle(), false).unwrap_or_default()
    }

    /// Returns how many elements there are.
    #[doc(alias = "dg_tensor_element_count")]
    pub fn element_count(&self) -> i64 {
        ffi::tensor_element_count(self.handle())
    }

    /// Returns its device: `cpu`, `cuda:1`.
    #[doc(alias = "dg_tensor_device")]
    pub fn device(&self) -> &'static str {
        std::str::from_utf8(ffi::tensor_device(self.handle())).unwrap_or("")
    }

    /// Returns whether backward computes a gradient for it or through it.
    #[doc(alias = "dg_tensor_requires_grad")]
    pub fn requires_grad(&self) -> bool {
        ffi::tensor_requires_grad(self.handle())
    }

    /// Returns a leaf with the same memory that requires grad. Earlier clones do not change, for
    /// other threads may be using them.
    ///
    /// `Code::FailedPrecondition` if it is not a leaf, `Code::InvalidArgument` if its dtype is
    /// neither floating nor complex.
    ///
    /// ```
    /// use distgrad::Tensor;
    /// let weight = Tensor::randn(&[4, 2])?.require_grad()?;
    /// assert!(weight.relu()?.requires_grad());
    /// assert!(!weight.detach()?.relu()?.requires_grad());
    /// # distgrad::Result::Ok(())
    /// ```
    #[doc(alias = "dg_tensor_require_grad")]
    pub fn require_grad(self) -> Result<Self> {
        // Of a tensor that is this function's alone, unless there is nothing to change.
        let leaf = if self.requires_grad() { self } else { self.detach()? };
        ffi::tensor_require_grad(leaf.handle())?;
        Ok(leaf)
    }

    /// Returns a tensor with the same memory and no autograd history: nothing that is computed from
    /// it is recorded.
    #[doc(alias = "dg_tensor_detach")]
    pub fn detach(&self) -> Result<Self> {
        Ok(Self::own(ffi::tensor_detach(self.handle())?))
    }
}

/// Creates one more reference to the same tensor. Panics if there is no memory for a handle.
impl Clone for Tensor {
    #[doc(alias = "dg_tensor_clone")]
    fn clone(&self) -> Self {
        Self::own(ffi::tensor_clone(self.handle()).expect("a handle of a live tensor"))
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?} on {})", self.dtype(), self.shape(), self.device())
    }
}

/// While it lives, operators on its thread are not recorded for backward. [`EnableGrad`] is its
/// reverse.
///
/// ```
/// # fn main() -> distgrad::Result<()> {
/// let weight = distgrad::Tensor::from_slice(&[1.0f32, 2.0], &[2])?.require_grad()?;
/// let _no_grad = distgrad::NoGrad::new();
/// assert!(!weight.relu()?.requires_grad());
/// # Ok(())
/// # }
/// ```
///
/// Guards of both kinds may end in any order: the last one that lives has its way. One that a task
/// holds across an `.await` counts for what else its thread does meanwhile.
///
/// It does not leave its thread:
///
/// ```compile_fail,E0277
/// let no_grad = distgrad::NoGrad::new();
/// std::thread::spawn(move || drop(no_grad));
/// ```
#[doc(alias = "dg_grad_set_enabled")]
pub struct NoGrad {
    _mode: GradMode,
}

/// While it lives, operators on its thread are recorded for backward, as they are at first: for a
/// part of what runs while a [`NoGrad`] lives.
///
/// ```
/// # fn main() -> distgrad::Result<()> {
/// let weight = distgrad::Tensor::from_slice(&[1.0f32, 2.0], &[2])?.require_grad()?;
/// let _no_grad = distgrad::NoGrad::new();
/// let _enable_grad = distgrad::EnableGrad::new();
/// assert!(weight.relu()?.requires_grad());
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_grad_set_enabled")]
pub struct EnableGrad {
    _mode: GradMode,
}

impl NoGrad {
    /// Stops recording on this thread, until it is dropped.
    #[allow(clippy::new_without_default)] // a guard is not a value to start from
    #[must_use = "it ends when it is dropped"]
    pub fn new() -> Self {
        Self { _mode: GradMode::new(false) }
    }
}

impl EnableGrad {
    /// Records on this thread, until it is dropped.
    #[allow(clippy::new_without_default)] // a guard is not a value to start from
    #[must_use = "it ends when it is dropped"]
    pub fn new() -> Self {
        Self { _mode: GradMode::new(true) }
    }
}

/// What the mode of its thread was before it. An `Rc`, for it does not leave that thread.
struct GradMode(Rc<Cell<bool>>);

thread_local! {
    /// Those of the guards that live, in the order in which they were made.
    static BEFORE: RefCell<Vec<Rc<Cell<bool>>>> = const { RefCell::new(Vec::new()) };
}

impl GradMode {
    fn new(enabled: bool) -> Self {
        let before = Rc::new(Cell::new(ffi::grad_set_enabled(enabled)));
        // Without the list, at the end of the thread, it is dropped as the last one.
        let _ = BEFORE.try_with(|all| all.borrow_mut().push(Rc::clone(&before)));
        Self(before)
    }
}

impl Drop for GradMode {
    fn drop(&mut self) {
        let next = BEFORE.try_with(|all| {
            let mut all = all.borrow_mut();
            let place = all.iter().position(|one| Rc::ptr_eq(one, &self.0))?;
            all.remove(place);
            all.get(place).cloned()
        });
        match next {
            // The one after it has the mode; what was before this one is now before that one.
            Ok(Some(next)) => next.set(self.0.get()),
            _ => drop(ffi::grad_set_enabled(self.0.get())),
        }
    }
}
