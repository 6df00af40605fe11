//! Optimizers that step on all workers at once, and local ones.
use crate::{
    ffi::{self, Handle, OptimizerHandle, Owned, WorkerHandle},
    message::handles_of,
    safetensors::text_of_path,
    Context, Result, Tensor, Worker,
};
use std::{borrow::Borrow, fmt, marker::PhantomData, path::Path, sync::Arc};

/// This worker's part of an optimizer that all workers of the job share under a name: each gives its
/// own parameters, and one of them asks for a step. A worker without parameters gives
/// `[] as [&Tensor; 0]`: of `[]` alone the compiler cannot tell the type of the elements.
///
/// Every worker creates its part before the first step. Where only some workers have parts,
/// [`set_workers`](Optimizer::set_workers) says which: a step does not pass over others by itself,
/// since a part that was forgotten would never be trained, and nobody would hear of it. The part
/// lasts until [`remove`](Optimizer::remove), or as long as the worker, also when this is dropped.
///
/// A local one (`create_local` of [`Sgd`] and [`Adam`]) has no worker, and no parts elsewhere: its
/// steps, clips and learning rates are for its own parameters, run on the thread that asks for them,
/// and take any context of this process. So it is what the step of a pipeline's stage calls
/// ([`PipelineStage::step`](crate::PipelineStage::step)). It lasts until this is dropped, and as long
/// as a [`CheckpointPart`](crate::CheckpointPart) that has it.
///
/// ```
/// use distgrad::{Optimizer, Sgd, Tensor, WorkerOptions};
/// let worker = WorkerOptions::new().create()?;
/// let weight = Tensor::from_slice(&[1.0f32, 2.0], &[2])?.require_grad()?;
/// let optimizer: Optimizer = Sgd::new(0.25).create(&worker, "", [&weight])?; // on every worker
/// let context = worker.context()?;
/// context.backward([weight.square()?.sum()?])?;
/// optimizer.step(&context)?; // on one of them, for all
/// assert_eq!(weight.to_vec::<f32>()?, [0.5, 1.0]);
/// # distgrad::Result::Ok(())
/// ```
///
/// ```compile_fail,E0505
/// # fn f(worker: distgrad::Worker, x: distgrad::Tensor) -> distgrad::Result<()> {
/// let optimizer = distgrad::Sgd::new(0.1).create(&worker, "", [&x])?;
/// drop(worker); // the optimizer borrows it
/// println!("{optimizer:?}");
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_optimizer")]
#[doc(alias = "dg_optimizer_destroy")]
pub struct Optimizer<'w> {
    handle: Owned<OptimizerHandle>,
    _kept: Option<Arc<Worker>>,
    lifetime: PhantomData<&'w Worker>,
}

impl Optimizer<'_> {
    fn own(handle: OptimizerHandle, kept: Option<Arc<Worker>>) -> Self {
        Self { handle: Owned::new(handle), _kept: kept, lifetime: PhantomData }
    }
    pub(crate) fn handle(&self) -> OptimizerHandle {
        self.handle.get()
    }

    /// Names the workers that have parts, this one among them, for the steps, learning rates and
    /// clips that are asked for here, from the next one on; without it these are all workers of the
    /// job, also those that join later, but for learning rates ([`Optimizer::set_learning_rate`]).
    ///
    /// `Code::InvalidArgument`, and nothing is changed, if a name is there twice, or this worker's is
    /// not; `Code::FailedPrecondition` for a local optimizer.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker, weight: &distgrad::Tensor) -> distgrad::Result<()> {
    /// let optimizer = distgrad::Sgd::new(0.1).create(worker, "head", [weight])?;
    /// optimizer.set_workers(&["worker0", "worker2"]) // worker1 has no parameters, and no part
    /// # }
    /// ```
    #[doc(alias = "dg_optimizer_set_workers")]
    pub fn set_workers(&self, workers: &[&str]) -> Result<()> {
        Ok(ffi::optimizer_set_workers(self.handle.get(), workers)?)
    }

    /// Steps the parts of all workers, each from its own gradients in the context. Waits for all.
    /// Parameters that have none there are left alone: so a local optimizer does nothing with a
    /// context of a worker that has not computed its gradients. Returns the first error, by rank,
    /// after which the others may have stepped: the same step is not to be asked for again, then.
    /// `Code::NotFound` for a worker that has no part; `Code::FailedPrecondition` for a context
    /// that is released.
    #[doc(alias = "dg_optimizer_step")]
    pub fn step(&self, context: &Context<'_>) -> Result<()> {
        Ok(ffi::optimizer_step(self.handle.get(), context.handle())?)
    }

    /// Clips the gradients of the parts of all workers by their global norm, before a step: the
    /// 2-norm of all of them as one vector, in which a tied parameter of a pipeline is there once,
    /// however many copies of it there are. If it is more than `max_norm` they are scaled down to
    /// that. Returns the norm before; 0 if there are no gradients. Waits for all.
    ///
    /// Errors as of a step; `Code::InvalidArgument` for a negative `max_norm`; `Code::OutOfRange`,
    /// with nothing scaled, if the norm is not finite.
    ///
    /// ```
    /// # fn f(context: &distgrad::Context, loss: &distgrad::Tensor, optimizer: &distgrad::Optimizer)
    /// # -> distgrad::Result<()> {
    /// context.backward([loss])?;
    /// let norm = optimizer.clip_gradients(context, 1.0)?; // on all workers
    /// println!("the norm was {norm}");
    /// optimizer.step(context)
    /// # }
    /// ```
    #[doc(alias = "dg_optimizer_clip_gradients")]
    pub fn clip_gradients(&self, context: &Context<'_>, max_norm: f64) -> Result<f64> {
        Ok(ffi::optimizer_clip_gradients(self.handle.get(), context.handle(), max_norm)?)
    }

    /// Sets the learning rate of the parts of all workers, from the next step on: for schedules.
    /// Waits for all. Without [`set_workers`](Self::set_workers) these are those that this worker
    /// has heard of: where workers join, [`Worker::update_members`](crate::Worker::update_members)
    /// comes before it.
    ///
    /// Errors as of a step; `Code::InvalidArgument`, and nothing is changed, if it is negative or
    /// not finite.
    ///
    /// ```
    /// # fn f(optimizer: &distgrad::Optimizer, epoch: i32) -> distgrad::Result<()> {
    /// optimizer.set_learning_rate(0.1 * 0.95f64.powi(epoch)) // on all workers
    /// # }
    /// ```
    #[doc(alias = "dg_optimizer_set_learning_rate")]
    pub fn set_learning_rate(&self, learning_rate: f64) -> Result<()> {
        Ok(ffi::optimizer_set_learning_rate(self.handle.get(), learning_rate)?)
    }

    /// Returns this worker's part as tensors with names: copies, whose names are the paths in the
    /// `state_dict()` of PyTorch's optimizer, joined by dots: `param_groups.0.lr`,
    /// `state.2.exp_avg`, `state.2.step`. Parameters count from 0, in the order of `create`; one
    /// that has not taken a step has no state. Waits for a step that runs.
    #[doc(alias = "dg_optimizer_state")]
    pub fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let state = ffi::optimizer_state(self.handle.get())?;
        Ok(state.into_iter().map(|each| (each.name, Tensor::own(each.tensor))).collect())
    }

    /// Replaces all that this worker's part holds, its learning rate and other options too, by
    /// copies of these tensors. Numbers may be of any dtype that holds them. Waits for a step that
    /// runs.
    ///
    /// `Code::InvalidArgument`, with nothing changed, says what is missing, what is unexpected, and
    /// what has another shape or dtype, or makes no sense.
    ///
    /// ```
    /// # fn f(optimizer: &distgrad::Optimizer) -> distgrad::Result<()> {
    /// let saved = optimizer.state()?;
    /// // ...
    /// optimizer.load_state(saved.iter().map(|(name, tensor)| (name, tensor)))
    /// # }
    /// ```
    #[doc(alias = "dg_optimizer_load_state")]
    pub fn load_state(
        &self,
        state: impl IntoIterator<Item = (impl AsRef<str>, impl Borrow<Tensor>)>,
    ) -> Result<()> {
        let (names, tensors): (Vec<_>, Vec<_>) = state.into_iter().unzip();
        let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        let (_tensors, handles) = handles_of(tensors);
        Ok(ffi::optimizer_load_state(self.handle.get(), &names, &handles)?)
    }

    /// Saves this worker's part to a safetensors file, by the names of its parameters, which may be
    /// more than the optimizer has. A step waits until its state is copied in memory.
    ///
    /// `Code::InvalidArgument` if a parameter of the optimizer has no name here, and for a state
    /// that [`load`](Optimizer::load) would refuse; else errors of the operating system.
    #[doc(alias = "dg_optimizer_save")]
    pub fn save(
        &self,
        parameters: impl IntoIterator<Item = (impl AsRef<str>, impl Borrow<Tensor>)>,
        path: impl AsRef<Path>,
    ) -> Result<()> {
        let (names, tensors): (Vec<_>, Vec<_>) = parameters.into_iter().unzip();
        let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        let (_tensors, handles) = handles_of(tensors);
        Ok(ffi::optimizer_save(self.handle(), &names, &handles, text_of_path(path.as_ref())?)?)
    }

    /// Loads what [`save`](Optimizer::save) wrote, or Python's torch with
    /// `optimizer_state_dict.py`: the state, and all options. Steps wait meanwhile.
    ///
    /// `Code::InvalidArgument`, with nothing changed, says what is missing, what is unexpected, and
    /// what has another shape or dtype; else errors of the operating system.
    ///
    /// ```
    /// # fn f(optimizer: &distgrad::Optimizer, weight: &distgrad::Tensor, bias: &distgrad::Tensor)
    /// # -> distgrad::Result<()> {
    /// let parameters = [("layer.weight", weight), ("layer.bias", bias)];
    /// optimizer.save(parameters, "optimizer.safetensors")?;
    /// // ... and when the program is started again, after the optimizer is created ...
    /// optimizer.load("optimizer.safetensors", parameters)
    /// # }
    /// ```
    #[doc(alias = "dg_optimizer_load")]
    pub fn load(
        &self,
        path: impl AsRef<Path>,
        parameters: impl IntoIterator<Item = (impl AsRef<str>, impl Borrow<Tensor>)>,
    ) -> Result<()> {
        let (names, tensors): (Vec<_>, Vec<_>) = parameters.into_iter().unzip();
        let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        let (_tensors, handles) = handles_of(tensors);
        Ok(ffi::optimizer_load(self.handle(), &names, &handles, text_of_path(path.as_ref())?)?)
    }

    /// Removes this worker's part: when this has returned no step touches its parameters, and the
    /// worker may create another one of that name. Steps then give `Code::NotFound`, also those
    /// that other workers ask for: so all workers remove theirs. Idempotent. Waits for a step that
    /// runs.
    #[doc(alias = "dg_optimizer_remove")]
    pub fn remove(&self) -> Result<()> {
        Ok(ffi::optimizer_remove(self.handle.get())?)
    }
}

impl fmt::Debug for Optimizer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Optimizer")
    }
}

/// Stochastic gradient descent.
///
/// ```
/// # fn f(worker: &distgrad::Worker, weight: &distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::Sgd;
/// let optimizer = Sgd::new(0.1).momentum(0.9).create(worker, "", [weight])?; // on every worker
/// let context = worker.context()?;
/// // ... a backward ...
/// optimizer.step(&context)?; // on one of them
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_sgd_options")]
#[derive(Clone, Copy, Debug)]
pub struct Sgd {
    learning_rate: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
}

impl Sgd {
    /// Creates the options, without momentum or weight decay.
    pub fn new(learning_rate: f64) -> Self {
        Self { learning_rate, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false }
    }
    /// Sets the factor of the momentum. Default: 0.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }
    /// Sets the dampening of the momentum. Default: 0.
    pub fn dampening(mut self, dampening: f64) -> Self {
        self.dampening = dampening;
        self
    }
    /// Sets the weight decay, which is added to the gradient. Default: 0.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }
    /// Uses Nesterov's momentum. Default: false.
    pub fn nesterov(mut self, nesterov: bool) -> Self {
        self.nesterov = nesterov;
        self
    }

    /// Creates this worker's part. `Code::AlreadyExists` if the worker has one of that name (the
    /// empty name counts); `Code::InvalidArgument` for a name of more than 900 bytes or with a `::`
    /// in it, and for a parameter that is not a leaf that requires grad.
    #[doc(alias = "dg_optimizer_create_sgd")]
    pub fn create<'w>(
        &self,
        worker: &'w Worker,
        name: &str,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<Optimizer<'w>> {
        Ok(Optimizer::own(self.create_handle(worker.handle(), name, parameters)?, None))
    }

    /// Creates a local optimizer, which has no worker. `Code::InvalidArgument` for a parameter that
    /// is not a leaf that requires grad.
    ///
    /// ```
    /// # fn f(weight: distgrad::Tensor) -> distgrad::Result<()> {
    /// use distgrad::{PipelineStage, Sgd};
    /// let optimizer = Sgd::new(0.1).momentum(0.9).create_local([&weight])?;
    /// let stage = PipelineStage::new(0, move |batch| Ok([batch.input(0)?.matmul(&weight)?]))
    ///     .step(move |context| Ok(optimizer.step(context)?)); // where the schedule has it
    /// # drop(stage);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_optimizer_create_sgd")]
    pub fn create_local(
        &self,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<Optimizer<'static>> {
        Ok(Optimizer::own(self.create_handle(WorkerHandle::NULL, "", parameters)?, None))
    }

    /// The same for an optimizer that keeps the worker: see
    /// [`shared_context`](Worker::shared_context).
    #[doc(alias = "dg_optimizer_create_sgd")]
    pub fn create_shared(
        &self,
        worker: &Arc<Worker>,
        name: &str,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<Optimizer<'static>> {
        let handle = self.create_handle(worker.handle(), name, parameters)?;
        Ok(Optimizer::own(handle, Some(Arc::clone(worker))))
    }

    fn create_handle(
        &self,
        worker: WorkerHandle,
        name: &str,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<OptimizerHandle> {
        let (_parameters, handles) = handles_of(parameters);
        Ok(ffi::optimizer_create_sgd(
            worker,
            name,
            &handles,
            [self.learning_rate, self.momentum, self.dampening, self.weight_decay],
            self.nesterov,
        )?)
    }
}

/// Adam (Kingma and Ba, arXiv:1412.6980), and AdamW (Loshchilov and Hutter, arXiv:1711.05101).
///
/// ```
/// # fn f(worker: &distgrad::Worker, weight: &distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::Adam;
/// let adam = Adam::new(1e-3).create(worker, "adam", [weight])?;
/// let adamw = Adam::adamw(1e-3).weight_decay(0.1).create(worker, "adamw", [weight])?;
/// # drop((adam, adamw));
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_adam_options")]
#[derive(Clone, Copy, Debug)]
pub struct Adam {
    learning_rate: f64,
    betas: (f64, f64),
    epsilon: f64,
    weight_decay: f64,
    amsgrad: bool,
    decoupled: bool,
}

impl Adam {
    /// Creates the options of Adam, without weight decay.
    pub fn new(learning_rate: f64) -> Self {
        Self {
            learning_rate,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay: 0.0,
            amsgrad: false,
            decoupled: false,
        }
    }
    /// Creates the options of AdamW, whose weight decay is decoupled from the gradient; 0.01 unless
    /// it is set.
    #[doc(alias = "dg_optimizer_create_adamw")]
    pub fn adamw(learning_rate: f64) -> Self {
        Self { weight_decay: 1e-2, decoupled: true, ..Self::new(learning_rate) }
    }
    /// Sets the decay rates of the two moments. Default: 0.9 and 0.999.
    pub fn betas(mut self, first: f64, second: f64) -> Self {
        self.betas = (first, second);
        self
    }
    /// Sets the term that keeps the divisor from 0. Default: 1e-8.
    pub fn epsilon(mut self, epsilon: f64) -> Self {
        self.epsilon = epsilon;
        self
    }
    /// Sets the weight decay, which Adam adds to the gradient, and AdamW takes from the parameter.
    /// Default: 0; of AdamW 0.01.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }
    /// Divides by the largest second moment so far (Reddi, Kale and Kumar, arXiv:1904.09237).
    /// Default: false.
    pub fn amsgrad(mut self, amsgrad: bool) -> Self {
        self.amsgrad = amsgrad;
        self
    }

    /// Creates this worker's part. `Code::AlreadyExists` if the worker has one of that name (the
    /// empty name counts); `Code::InvalidArgument` for a name of more than 900 bytes or with a `::`
    /// in it, and for a parameter that is not a leaf that requires grad.
    #[doc(alias = "dg_optimizer_create_adam")]
    pub fn create<'w>(
        &self,
        worker: &'w Worker,
        name: &str,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<Optimizer<'w>> {
        Ok(Optimizer::own(self.create_handle(worker.handle(), name, parameters)?, None))
    }

    /// Creates a local optimizer: see [`Sgd::create_local`].
    #[doc(alias = "dg_optimizer_create_adam")]
    pub fn create_local(
        &self,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<Optimizer<'static>> {
        Ok(Optimizer::own(self.create_handle(WorkerHandle::NULL, "", parameters)?, None))
    }

    /// The same for an optimizer that keeps the worker: see
    /// [`shared_context`](Worker::shared_context).
    #[doc(alias = "dg_optimizer_create_adam")]
    pub fn create_shared(
        &self,
        worker: &Arc<Worker>,
        name: &str,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<Optimizer<'static>> {
        let handle = self.create_handle(worker.handle(), name, parameters)?;
        Ok(Optimizer::own(handle, Some(Arc::clone(worker))))
    }

    fn create_handle(
        &self,
        worker: WorkerHandle,
        name: &str,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<OptimizerHandle> {
        let (_parameters, handles) = handles_of(parameters);
        let (beta1, beta2) = self.betas;
        Ok(ffi::optimizer_create_adam(
            worker,
            name,
            &handles,
            [self.learning_rate, beta1, beta2, self.epsilon, self.weight_decay],
            self.amsgrad,
            self.decoupled,
        )?)
    }
}
