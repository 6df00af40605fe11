//! Contexts of distributed autograd, and their backward.
use crate::{
    ffi::{self, ContextHandle, Handle, Owned, TensorHandle, WorkerHandle},
    future::{milliseconds_or_default, Future},
    message::handles_of,
    Caller, Result, Tensor, Worker,
};
use std::{borrow::Borrow, fmt, marker::PhantomData, sync::Arc, time::Duration};

/// One training step across workers, with what was sent and received in it, and the gradients that
/// its backward gave. Dropping it releases it on every worker.
///
/// ```
/// # fn f(worker: &distgrad::Worker, x: &distgrad::Tensor, optimizer: &distgrad::Optimizer)
/// # -> distgrad::Result<()> {
/// use distgrad::Message;
/// let context = worker.context()?;
/// let reply = context.call("back", "classify", &Message::new("", [x])?)?;
/// context.backward([reply.tensor(0)?.sum()?])?; // through both workers
/// optimizer.step(&context)?; // with the gradients that it has on each
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_context")]
pub struct Context<'w> {
    worker: WorkerHandle,
    handle: Owned<ContextHandle>,
    _kept: Option<Arc<Worker>>,
    lifetime: PhantomData<&'w Worker>,
}

impl Context<'static> {
    /// The same as a context that lives as long as it likes, for it keeps the worker.
    pub(crate) fn own_with(worker: &Arc<Worker>, handle: ContextHandle) -> Self {
        Self { _kept: Some(Arc::clone(worker)), ..Self::own(worker.handle(), handle) }
    }
}

impl<'w> Context<'w> {
    pub(crate) fn own(worker: WorkerHandle, handle: ContextHandle) -> Self {
        Self { worker, handle: Owned::new(handle), _kept: None, lifetime: PhantomData }
    }
    pub(crate) fn handle(&self) -> ContextHandle {
        self.handle.get()
    }
    pub(crate) fn is_some(&self) -> bool {
        !self.handle().is_null()
    }

    /// Returns the same number on all workers.
    #[doc(alias = "dg_context_id")]
    pub fn id(&self) -> u64 {
        ffi::context_id(self.handle())
    }

    /// Returns a [`Caller`] whose calls are recorded in this context, to set a timeout or a
    /// cancellation.
    pub fn caller(&self) -> Caller<'_> {
        Caller::new(self.worker, self.handle())
    }

    /// Computes the gradients of everything that `roots` depend on, on every worker. Waits until
    /// they are in place everywhere.
    ///
    /// Roots were computed on this worker, from something that requires grad, and have one real
    /// element each ([`BackwardOptions::root_gradients`] is for others). After an error the context
    /// is good for [`release`](Context::release) only.
    ///
    /// The error of a node keeps its code and names worker and node. Besides:
    /// `Code::FailedPrecondition` if the graph is used up or the context released,
    /// `Code::DeadlineExceeded` with what was waited for, `Code::Unavailable` if a worker that
    /// takes part is lost, `Code::Cancelled`.
    #[doc(alias = "dg_context_backward")]
    pub fn backward(&self, roots: impl IntoIterator<Item = impl Borrow<Tensor>>) -> Result<()> {
        self.backward_with(roots, &BackwardOptions::new())
    }

    /// The same, with options.
    #[doc(alias = "dg_context_backward")]
    pub fn backward_with(
        &self,
        roots: impl IntoIterator<Item = impl Borrow<Tensor>>,
        options: &BackwardOptions,
    ) -> Result<()> {
        let (_roots, roots) = handles_of(roots);
        let gradients = options.gradients(roots.len())?;
        let (retain_graph, timeout) = (options.retain_graph, options.timeout_ms());
        Ok(ffi::context_backward(self.handle(), &roots, &gradients, retain_graph, timeout)?)
    }

    /// The same without waiting.
    ///
    /// ```
    /// # fn f(context: &distgrad::Context, loss: &distgrad::Tensor) -> distgrad::Result<()> {
    /// use distgrad::BackwardOptions;
    /// let backward = context.backward_async([loss], &BackwardOptions::new())?;
    /// // ... the next batch is read meanwhile ...
    /// backward.wait()?; // or .await
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_context_backward_async")]
    pub fn backward_async(
        &self,
        roots: impl IntoIterator<Item = impl Borrow<Tensor>>,
        options: &BackwardOptions,
    ) -> Result<Future<()>> {
        let (_roots, roots) = handles_of(roots);
        let gradients = options.gradients(roots.len())?;
        let (retain_graph, timeout) = (options.retain_graph, options.timeout_ms());
        let context = self.handle();
        let handle =
            ffi::context_backward_async(context, &roots, &gradients, retain_graph, timeout)?;
        Ok(Future::own(handle))
    }

    /// Returns the gradient of a leaf of this worker. `Code::NotFound` if no root depends on it,
    /// `Code::FailedPrecondition` once the context is released.
    #[doc(alias = "dg_context_gradient")]
    pub fn gradient(&self, leaf: &Tensor) -> Result<Tensor> {
        Ok(Tensor::own(ffi::context_gradient(self.handle(), leaf.handle())?))
    }

    /// Replaces the gradient of a leaf that has one. `Code::InvalidArgument` unless it has the shape,
    /// dtype and device of the leaf; else errors as of [`gradient`](Context::gradient).
    #[doc(alias = "dg_context_set_gradient")]
    pub fn set_gradient(&self, leaf: &Tensor, gradient: &Tensor) -> Result<()> {
        Ok(ffi::context_set_gradient(self.handle(), leaf.handle(), gradient.handle())?)
    }

    /// Returns every leaf of this worker that has a gradient, with the gradient, in no order.
    /// `Code::FailedPrecondition` once the context is released.
    ///
    /// ```
    /// # let worker = distgrad::WorkerOptions::new().create()?;
    /// use distgrad::Tensor;
    /// let x = Tensor::from_slice(&[3.0f32, 0.25], &[2])?.require_grad()?;
    /// let context = worker.context()?;
    /// context.backward([x.square()?.sum()?])?;
    /// for (leaf, gradient) in context.gradients()? {
    ///     context.set_gradient(&leaf, &gradient.clamp(-1.0, 1.0)?)?;
    /// }
    /// assert_eq!(context.gradient(&x)?.to_vec::<f32>()?, [1.0, 0.5]);
    /// # distgrad::Result::Ok(())
    /// ```
    #[doc(alias = "dg_context_gradients")]
    pub fn gradients(&self) -> Result<Vec<(Tensor, Tensor)>> {
        let handles = ffi::context_gradients(self.handle())?;
        let pairs = handles.chunks_exact(2);
        Ok(pairs.map(|pair| (Tensor::own(pair[0]), Tensor::own(pair[1]))).collect())
    }

    /// Ends the context on every worker; a pass in flight fails. Idempotent, does not wait.
    #[doc(alias = "dg_context_release")]
    #[doc(alias = "dg_context_destroy")]
    pub fn release(&self) -> Result<()> {
        Ok(ffi::context_release(self.handle())?)
    }
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({:#x})", self.id())
    }
}

/// The options of a backward, each with a default.
///
/// ```
/// # fn f(context: &distgrad::Context, y: &distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::{BackwardOptions, Dtype, Tensor};
/// // Of a root that is no scalar; and the graph stays, for another backward.
/// let ones = Tensor::ones(&y.shape(), Dtype::FLOAT32)?;
/// let options = BackwardOptions::new().root_gradients(&[Some(&ones)]).retain_graph(true);
/// context.backward_with([y], &options)?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_backward_options")]
#[derive(Clone, Debug, Default)]
pub struct BackwardOptions {
    root_gradients: Vec<Option<Tensor>>,
    retain_graph: bool,
    timeout: Option<Duration>,
}

impl BackwardOptions {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets a gradient of its shape for each root; `None` means 1, for roots of one real
    /// element. Default: all 1.
    pub fn root_gradients(mut self, gradients: &[Option<&Tensor>]) -> Self {
        self.root_gradients = gradients.iter().map(|gradient| gradient.cloned()).collect();
        self
    }
    /// Keeps the graph, so that another backward may follow; gradients add up. Default: false.
    #[doc(alias = "DG_BACKWARD_RETAIN_GRAPH")]
    pub fn retain_graph(mut self, retain_graph: bool) -> Self {
        self.retain_graph = retain_graph;
        self
    }
    /// Sets the timeout, after which it fails with `Code::DeadlineExceeded`. Default: that of the
    /// worker's options.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    fn timeout_ms(&self) -> i64 {
        milliseconds_or_default(self.timeout)
    }

    fn gradients(&self, roots: usize) -> Result<Vec<TensorHandle>> {
        let given = &self.root_gradients;
        if !given.is_empty() && given.len() != roots {
            let text = format!("{} root gradients for {roots} roots", given.len());
            return Err(crate::Error::invalid(text));
        }
        Ok(given.iter().map(|gradient| Tensor::handle_or_null(gradient.as_ref())).collect())
    }
}
