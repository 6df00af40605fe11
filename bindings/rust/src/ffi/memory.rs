//! Elements of tensors: in from slices and vectors, out to vectors, and shared by DLPack.
use super::{bridge::raw, callback::Owner, handle::MessageHandle};
use crate::{element::Element, Error, Result, Tensor};
use std::{ffi::c_void, slice};

/// Checks that there are as many elements as `shape` has.
fn check_size<T>(data: &[T], shape: &[i64]) -> Result<()> {
    let count = shape.iter().try_fold(1i64, |count, &size| count.checked_mul(size));
    if shape.iter().all(|&size| size >= 0) && count == i64::try_from(data.len()).ok() {
        return Ok(());
    }
    Err(Error::invalid(format!("{} elements do not fill a tensor of shape {shape:?}", data.len())))
}

impl Tensor {
    /// Creates a tensor on the CPU with a copy of `data`, in row-major order.
    ///
    /// `Code::InvalidArgument` if there are not as many elements as `shape` has;
    /// `Code::ResourceExhausted` if memory is out.
    #[doc(alias = "dg_tensor_from_data")]
    pub fn from_slice<T: Element>(data: &[T], shape: &[i64]) -> Result<Self> {
        check_size(data, shape)?;
        // SAFETY: "Creates a tensor on the CPU with a copy of the elements at `data`, in row-major
        // order": they are as many as the shape has, and of that dtype.
        let handle =
            unsafe { raw::tensor_from_data(data.as_ptr().cast(), T::DTYPE.code(), shape)? };
        Ok(Self::own(handle))
    }

    /// Creates a tensor on the CPU over `data`, without a copy; `data` is dropped with the last
    /// reference to the tensor's storage, on any thread.
    ///
    /// `Code::InvalidArgument` if there are not as many elements as `shape` has.
    ///
    /// ```
    /// let x = distgrad::Tensor::from_vec(vec![1i64, 2, 3, 4], &[2, 2])?;
    /// assert_eq!(x.select(0, 1)?.to_vec::<i64>()?, [3, 4]);
    /// # distgrad::Result::Ok(())
    /// ```
    #[doc(alias = "dg_tensor_from_memory")]
    pub fn from_vec<T: Element>(mut data: Vec<T>, shape: &[i64]) -> Result<Self> {
        check_size(&data, shape)?;
        let pointer = data.as_mut_ptr().cast();
        // SAFETY: "over the caller's memory, which must stay valid until `destroy` is called": the
        // owner keeps the vector, whose elements do not move with it, and nobody else can reach it.
        let handle =
            unsafe { raw::tensor_from_memory(pointer, T::DTYPE.code(), shape, Owner::new(data))? };
        Ok(Self::own(handle))
    }

    /// Copies the elements out, in row-major order, whatever the strides.
    ///
    /// `Code::InvalidArgument` for another dtype; `Code::FailedPrecondition` if the elements are
    /// not in the CPU's memory as they are (sparse, other devices).
    #[doc(alias = "dg_tensor_data")]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let tensor = self.detach()?.contiguous()?;
        // SAFETY: a copy is made at once, of a handle that no one else has.
        Ok(unsafe { tensor.as_slice()? }.to_vec())
    }

    /// Borrows the elements where they are, in row-major order.
    ///
    /// Errors as of [`Tensor::to_vec`], and `Code::FailedPrecondition` if there are gaps between the
    /// elements or they are in another order.
    ///
    /// It is unsafe, for only the caller knows that nothing writes to them meanwhile; and the slice
    /// does not outlive the tensor:
    ///
    /// ```compile_fail,E0133
    /// let x = distgrad::Tensor::from_slice(&[1.0f32], &[1])?;
    /// let elements: &[f32] = x.as_slice()?;
    /// # distgrad::Result::Ok(())
    /// ```
    /// ```compile_fail,E0505
    /// let x = distgrad::Tensor::from_slice(&[1.0f32], &[1])?;
    /// let elements: &[f32] = unsafe { x.as_slice()? };
    /// drop(x);
    /// println!("{elements:?}");
    /// # distgrad::Result::Ok(())
    /// ```
    ///
    /// # Safety
    /// While the slice lives nothing writes to the memory, not through other tensors that share it
    /// either, and no operator changes the shape of the tensor in place.
    #[doc(alias = "dg_tensor_data")]
    pub unsafe fn as_slice<T: Element>(&self) -> Result<&[T]> {
        if self.dtype() != T::DTYPE {
            return Err(Error::invalid(format!(
                "the tensor's elements are {}, not {}",
                self.dtype(),
                T::DTYPE
            )));
        }
        let pointer = raw::tensor_data(self.handle())?;
        let count = self.element_count();
        if count == 0 {
            return Ok(&[]); // the pointer may be null, and strides mean nothing
        }
        let shape = raw::tensor_layout(self.handle(), true)?;
        let strides = raw::tensor_layout(self.handle(), false)?;
        let mut expected = 1;
        for (&size, &stride) in shape.iter().zip(&strides).rev() {
            if size > 1 && stride != expected {
                return Err(Error::precondition(
                    "the tensor's elements are not in row-major order",
                ));
            }
            expected *= size.max(1);
        }
        // SAFETY: "the address of the first element; the others are at the strides", and "valid as
        // long as the handle", which outlives the slice; the memory is not "too small"; the rest is
        // the caller's promise. torch aligns its memory, but imported memory need not be aligned:
        // that is checked.
        if !pointer.cast::<T>().is_aligned() {
            return Err(Error::precondition("the tensor's elements are not aligned"));
        }
        Ok(unsafe { slice::from_raw_parts(pointer.cast(), count as usize) })
    }

    /// Returns the `at::Tensor *` of this tensor, for programs that link the same libtorch. It
    /// lives as long as this `Tensor`.
    #[doc(alias = "dg_tensor_torch")]
    pub fn as_torch_ptr(&self) -> *mut c_void {
        raw::tensor_torch(self.handle()).cast()
    }

    /// Creates a reference to an `at::Tensor` of the same libtorch, which shares its memory and
    /// autograd history.
    ///
    /// # Safety
    /// `tensor` points to an `at::Tensor` that is alive during the call, of the libtorch that
    /// distgrad runs on ([`torch_version`](crate::torch_version)).
    #[doc(alias = "dg_tensor_from_torch")]
    pub unsafe fn from_torch_ptr(tensor: *const c_void) -> Result<Self> {
        // SAFETY: "creates a handle for a `const at::Tensor *`": the caller's promise.
        Ok(Self::own(unsafe { raw::tensor_from_torch(tensor.cast())? }))
    }

    /// Exports this tensor to another library, without a copy.
    ///
    /// `Code::FailedPrecondition` if it requires grad ([`Tensor::detach`] it first), or its memory
    /// does not hold its elements as they are (sparse, other devices).
    ///
    /// ```
    /// use distgrad::Tensor;
    /// let x = Tensor::from_slice(&[1.0f32, 2.0], &[2])?;
    /// let exported = x.to_dlpack()?; // its `into_raw()` is for another library
    /// let same = Tensor::from_dlpack(exported)?; // the same memory
    /// assert_eq!(same.to_vec::<f32>()?, [1.0, 2.0]);
    /// # distgrad::Result::Ok(())
    /// ```
    #[doc(alias = "dg_tensor_to_dlpack")]
    pub fn to_dlpack(&self) -> Result<DlpackTensor> {
        Ok(DlpackTensor(raw::tensor_to_dlpack(self.handle())?.cast()))
    }

    /// Imports a tensor of another library, without a copy.
    ///
    /// `Code::FailedPrecondition` if it is read-only, for operators could write to it;
    /// `Code::Unimplemented` for another major version of DLPack, or another device;
    /// `Code::InvalidArgument` for a dtype that torch lacks, and for elements at null.
    #[doc(alias = "dg_tensor_from_dlpack")]
    pub fn from_dlpack(tensor: DlpackTensor) -> Result<Self> {
        // SAFETY: "Takes `managed`: its deleter runs when the last reference is gone", also when it
        // fails, and so ours does not.
        Ok(Self::own(unsafe { raw::tensor_from_dlpack(tensor.into_raw().cast())? }))
    }
}

/// The payload of a message that `_owner` keeps.
pub(crate) fn payload<T>(_owner: &T, message: MessageHandle) -> &[u8] {
    // SAFETY: "lives as long as `message`", which does not change and lives as long as its owner.
    unsafe { raw::message_payload(message) }
}

/// The head of a `DLManagedTensorVersioned` (DLPack 1.x, `dlpack/dlpack.h`).
#[repr(C)]
struct Managed {
    version: [u32; 2],
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// Owns a `DLManagedTensorVersioned` (DLPack 1.x): a tensor on its way from one library to another.
///
/// ```
/// use distgrad::{DlpackTensor, Tensor};
/// let ours = Tensor::from_slice(&[1.0f32, 2.0], &[2])?.to_dlpack()?;
/// let pointer = ours.into_raw(); // for another library, which calls its deleter some time
/// // SAFETY: it is what `into_raw` has just released.
/// let theirs = unsafe { DlpackTensor::from_raw(pointer) }; // as of what another library gives
/// assert_eq!(Tensor::from_dlpack(theirs)?.to_vec::<f32>()?, [1.0, 2.0]);
/// # distgrad::Result::Ok(())
/// ```
///
/// It may be sent to another thread, but not shared with one:
///
/// ```compile_fail,E0277
/// fn check<T: Sync>() {}
/// check::<distgrad::DlpackTensor>();
/// ```
pub struct DlpackTensor(*mut Managed);

// SAFETY: DLPack's deleter may be called on any thread, and nothing else is done with it here.
unsafe impl Send for DlpackTensor {}

impl DlpackTensor {
    /// Takes a `DLManagedTensorVersioned *` that another library exported.
    ///
    /// # Safety
    /// It is one, and nobody else will call its deleter. Nothing writes to its memory by another
    /// tensor while operators, or a graph that has saved it, use the imported one: torch counts
    /// what is written by each of them alone, and takes indices that it has looked at for good.
    /// That is no matter for what [`Tensor::to_dlpack`] exported: both tensors are counted as one.
    pub unsafe fn from_raw(managed: *mut c_void) -> Self {
        Self(managed.cast())
    }

    /// Borrows it.
    pub fn as_ptr(&self) -> *mut c_void {
        self.0.cast()
    }

    /// Releases it: the caller calls its deleter, or passes it to a library that will.
    pub fn into_raw(self) -> *mut c_void {
        let managed = self.0;
        std::mem::forget(self);
        managed.cast()
    }
}

impl Drop for DlpackTensor {
    fn drop(&mut self) {
        // SAFETY: it is owned, so it is alive; "The caller owns *out, and calls its deleter to end
        // it"; DLPack allows it to be missing.
        unsafe {
            if let Some(deleter) = self.0.as_ref().and_then(|managed| managed.deleter) {
                deleter(self.0);
            }
        }
    }
}
