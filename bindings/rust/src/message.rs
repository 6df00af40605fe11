//! Messages, which calls carry.
use crate::{
    ffi::{self, MessageHandle, Owned, TensorHandle},
    Error, Result, Tensor,
};
use std::{borrow::Borrow, fmt};

/// What a call carries, either way: some bytes and a list of tensors. Immutable.
///
/// ```
/// use distgrad::{Message, Tensor};
/// let message = Message::new("step 3", [&Tensor::from_slice(&[1.0f32, 2.0], &[2])?])?;
/// assert_eq!(message.text()?, "step 3");
/// assert_eq!(message.tensor(0)?.to_vec::<f32>()?, [1.0, 2.0]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_message")]
pub struct Message(Owned<MessageHandle>);

impl Message {
    pub(crate) fn own(handle: MessageHandle) -> Self {
        Self(Owned::new(handle))
    }
    pub(crate) fn handle(&self) -> MessageHandle {
        self.0.get()
    }
    pub(crate) fn release(self) -> MessageHandle {
        self.0.release()
    }

    /// Creates a message with a copy of the payload and references to the tensors.
    ///
    /// A message without tensors is made by [`from_payload`](Message::from_payload), and one without
    /// a payload, too, by [`empty`](Message::empty). An empty array does not compile in their place,
    /// for the compiler cannot tell the type of elements that are not there:
    ///
    /// ```compile_fail,E0283
    /// let message = distgrad::Message::new("step 3", [])?; // write Message::from_payload("step 3")
    /// # distgrad::Result::Ok(())
    /// ```
    #[doc(alias = "dg_message_create")]
    pub fn new(
        payload: impl AsRef<[u8]>,
        tensors: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<Self> {
        let (_tensors, handles) = handles_of(tensors);
        Ok(Self::own(ffi::message_create(payload.as_ref(), &handles)?))
    }

    /// Creates a message that has neither payload nor tensors: what to write where
    /// `Message::new("", [])` [does not compile](Message::new).
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// worker.call("back", "reset", &distgrad::Message::empty()?)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn empty() -> Result<Self> {
        Self::from_payload("")
    }

    /// Creates a message of a payload alone, without tensors.
    ///
    /// ```
    /// use distgrad::Message;
    /// let message = Message::from_payload("step 3")?;
    /// assert_eq!((message.text()?, message.tensor_count()), ("step 3", 0));
    /// # distgrad::Result::Ok(())
    /// ```
    pub fn from_payload(payload: impl AsRef<[u8]>) -> Result<Self> {
        Ok(Self::own(ffi::message_create(payload.as_ref(), &[])?))
    }

    /// Creates a message with places that may have no tensor.
    ///
    /// ```
    /// use distgrad::{Message, Tensor};
    /// let weight = Tensor::from_slice(&[1.0f32, 2.0], &[2])?;
    /// let bias: Option<&Tensor> = None;
    /// let message = Message::with_gaps("layer 0", &[Some(&weight), bias])?;
    /// assert_eq!(message.tensor_count(), 2);
    /// assert!(message.tensors()?[1].is_none());
    /// # distgrad::Result::Ok(())
    /// ```
    pub fn with_gaps(payload: impl AsRef<[u8]>, tensors: &[Option<&Tensor>]) -> Result<Self> {
        let handles: Vec<_> =
            tensors.iter().map(|tensor| Tensor::handle_or_null(*tensor)).collect();
        Ok(Self::own(ffi::message_create(payload.as_ref(), &handles)?))
    }

    /// Returns the payload.
    #[doc(alias = "dg_message_payload")]
    pub fn payload(&self) -> &[u8] {
        ffi::payload(self, self.handle())
    }

    /// Returns the payload as text; `Code::InvalidArgument` if it is not UTF-8.
    pub fn text(&self) -> Result<&str> {
        text_of(self.payload())
    }

    /// Returns how many places for tensors there are.
    #[doc(alias = "dg_message_tensor_count")]
    pub fn tensor_count(&self) -> usize {
        ffi::message_tensor_count(self.handle())
    }

    /// Returns one of the tensors. `Code::InvalidArgument` beyond the last place, `Code::NotFound`
    /// for a place without a tensor.
    #[doc(alias = "dg_message_tensor")]
    pub fn tensor(&self, index: usize) -> Result<Tensor> {
        tensor_of(self.handle(), index)?.ok_or_else(|| gap(index))
    }

    /// Returns the tensors of all places; `None` for a place without one.
    pub fn tensors(&self) -> Result<Vec<Option<Tensor>>> {
        (0..self.tensor_count()).map(|index| tensor_of(self.handle(), index)).collect()
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, tensors) = (self.payload().len(), self.tensor_count());
        write!(f, "Message({bytes} bytes, {tensors} tensors)")
    }
}

/// Returns the handles of tensors, and what keeps them alive while they are used.
pub(crate) fn handles_of<B: Borrow<Tensor>>(
    tensors: impl IntoIterator<Item = B>,
) -> (Vec<B>, Vec<TensorHandle>) {
    let tensors: Vec<B> = tensors.into_iter().collect();
    let handles = tensors.iter().map(|tensor| tensor.borrow().handle()).collect();
    (tensors, handles)
}

/// The functions below also serve requests, which borrow their message.
pub(crate) fn text_of(payload: &[u8]) -> Result<&str> {
    std::str::from_utf8(payload)
        .map_err(|error| Error::invalid(format!("the payload is no text: {error}")))
}
pub(crate) fn tensor_of(handle: MessageHandle, index: usize) -> Result<Option<Tensor>> {
    Ok(Tensor::own_or_none(ffi::message_tensor(handle, index)?))
}
pub(crate) fn gap(index: usize) -> Error {
    Error::new(crate::Code::NotFound, format!("the message has no tensor at place {index}"))
}
