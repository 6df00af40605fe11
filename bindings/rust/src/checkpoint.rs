//! Checkpoints: the state of a whole job at one step.
use crate::{
    error::BoxedError,
    ffi::{
        self, CheckpointManagerHandle, CheckpointPartHandle, Owned, PartFunctions,
        RawCheckpointContents, RawCheckpointManagerOptions, RawEntry, RawLoadOptions,
        RawLoadedCheckpoint, RawLoadedValues,
    },
    future::{milliseconds, milliseconds_or_default, FOREVER},
    safetensors::text_of_path,
    Future, Optimizer, Result, Tensor, Worker,
};
use std::{
    borrow::Borrow,
    collections::BTreeMap,
    fmt,
    marker::PhantomData,
    path::{Path, PathBuf},
    time::Duration,
};

/// Small things that are no tensors, by name: the epoch, the place in the data, the state of a
/// random generator. Any bytes, 1 MiB of them at most.
///
/// ```
/// use distgrad::CheckpointValues;
/// let values = CheckpointValues::from([("epoch".into(), b"3".to_vec())]);
/// assert_eq!(values["epoch"], b"3");
/// ```
#[doc(alias = "dg_checkpoint_values_set")]
pub type CheckpointValues = BTreeMap<String, Vec<u8>>;

/// What [`load_values`](CheckpointContents::load_values) gets.
///
/// ```
/// use distgrad::{CheckpointContents, LoadedValues};
/// let contents = CheckpointContents::new().load_values(|loaded: &LoadedValues| {
///     let epoch = loaded.values.get("epoch").ok_or("the checkpoint has no epoch")?;
///     println!("step {} was in epoch {}", loaded.step, String::from_utf8_lossy(epoch));
///     Ok(())
/// });
/// # drop(contents);
/// ```
#[doc(alias = "dg_loaded_values")]
#[doc(alias = "dg_checkpoint_worker_values")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadedValues {
    /// The step of the checkpoint.
    pub step: i64,
    /// What the worker of this name saved; else nothing.
    pub values: CheckpointValues,
    /// What all workers saved, by their names.
    pub workers: BTreeMap<String, CheckpointValues>,
}

fn values_of(entries: Vec<RawEntry>) -> CheckpointValues {
    entries.into_iter().map(|entry| (entry.name, entry.value)).collect()
}

impl From<RawLoadedValues> for LoadedValues {
    fn from(raw: RawLoadedValues) -> Self {
        let workers = raw.workers.into_iter();
        Self {
            step: raw.step,
            values: values_of(raw.values),
            workers: workers.map(|each| (each.worker, values_of(each.values))).collect(),
        }
    }
}

/// What a worker has of a checkpoint: tensors, optimizers and values.
///
/// ```
/// # fn f<'w>(worker: &'w distgrad::Worker, weight: distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::{CheckpointContents, CheckpointManagerOptions, CheckpointValues, Code, Sgd};
/// let optimizer = Sgd::new(0.1).momentum(0.9).create(worker, "", [&weight])?;
/// let part = CheckpointContents::new() // on every worker
///     .tensors([("weight", &weight)])
///     .optimizer("sgd", &optimizer)
///     .save_values(|| Ok(CheckpointValues::from([("epoch".into(), b"3".to_vec())])))
///     .create(worker, "")?;
///
/// let checkpoints = CheckpointManagerOptions::new().create(worker, "folder")?; // on one of them
/// let first_step = match checkpoints.load(&Default::default()) {
///     Ok(loaded) => loaded.step,
///     Err(error) if error.code() == Code::NotFound => 0,
///     Err(error) => return Err(error),
/// };
/// for step in first_step..1000 {
///     // ... a step ...
///     if (step + 1) % 100 == 0 {
///         checkpoints.save(step + 1, None)?;
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_checkpoint_contents")]
#[derive(Default)]
pub struct CheckpointContents<'a> {
    tensors: Vec<(String, Tensor)>,
    optimizers: Vec<(String, &'a Optimizer<'a>)>,
    save_values: Option<Box<ffi::SaveValuesFn>>,
    load_values: Option<Box<ffi::LoadValuesFn>>,
}

impl<'a> CheckpointContents<'a> {
    /// Nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds parameters and buffers, by names that are theirs in the whole job. What several workers
    /// have under one name is the same tensor (replicas), and one of them saves it.
    pub fn tensors(
        mut self,
        tensors: impl IntoIterator<Item = (impl Into<String>, impl Borrow<Tensor>)>,
    ) -> Self {
        let tensors = tensors.into_iter();
        self.tensors.extend(tensors.map(|(name, tensor)| (name.into(), tensor.borrow().clone())));
        self
    }

    /// Adds an optimizer of the part's own worker, or a local one, by a name of letters, digits,
    /// `_` and `-`. Its parameters are among the tensors. One that is removed before the part makes
    /// saves and loads fail with `Code::FailedPrecondition`.
    pub fn optimizer(mut self, name: impl Into<String>, optimizer: &'a Optimizer<'a>) -> Self {
        self.optimizers.push((name.into(), optimizer));
        self
    }

    /// Sets what is called for each save: on a thread of the worker, where it may wait and make
    /// calls. With its error, or panic, the save fails; the [origin](crate::Error::origin) of that
    /// is a handler of this worker. The worker keeps it: let it hold a [`Weak`](std::sync::Weak) of
    /// that, for an `Arc` would keep both for ever.
    pub fn save_values<F>(mut self, save_values: F) -> Self
    where
        F: Fn() -> std::result::Result<CheckpointValues, BoxedError> + Send + Sync + 'static,
    {
        self.save_values = Some(Box::new(save_values));
        self
    }

    /// Sets what is called when this worker's tensors and optimizers are loaded, on a thread of the
    /// worker. With its error, or panic, the load fails, and it holds no `Arc` of the worker, as of
    /// `save_values`.
    pub fn load_values<F>(mut self, load_values: F) -> Self
    where
        F: Fn(&LoadedValues) -> std::result::Result<(), BoxedError> + Send + Sync + 'static,
    {
        self.load_values = Some(Box::new(load_values));
        self
    }

    /// Creates the worker's part of the checkpoints of that name, which managers of whichever
    /// worker of the job save and load; every worker does so before the first save or load.
    ///
    /// `Code::AlreadyExists` if the worker has a part of that name (the empty name counts);
    /// `Code::InvalidArgument` for a name of more than 900 bytes or with a `::` in it, for tensors
    /// that no file can have, by their dtype, say, or the name `__metadata__`, for names that are
    /// there twice, for an optimizer of another worker, and for a parameter of an optimizer that is
    /// not among the tensors;
    /// `Code::FailedPrecondition` for an optimizer that was removed. Waits for steps of the
    /// optimizers.
    #[doc(alias = "dg_checkpoint_part_create")]
    pub fn create<'w>(self, worker: &'w Worker, name: &str) -> Result<CheckpointPart<'w>> {
        let names: Vec<&str> = self.tensors.iter().map(|(name, _)| name.as_str()).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(_, tensor)| tensor.handle()).collect();
        let optimizer_names: Vec<&str> =
            self.optimizers.iter().map(|(name, _)| name.as_str()).collect();
        let optimizers: Vec<_> = self.optimizers.iter().map(|(_, one)| one.handle()).collect();
        let contents = RawCheckpointContents {
            tensor_names: &names,
            tensors: &tensors,
            optimizer_names: &optimizer_names,
            optimizers: &optimizers,
            saves_values: self.save_values.is_some(),
            loads_values: self.load_values.is_some(),
        };
        let functions = PartFunctions::new(self.save_values, self.load_values);
        let handle = ffi::checkpoint_part_create(worker.handle(), name, &contents, functions)?;
        Ok(CheckpointPart { handle: Owned::new(handle), lifetime: PhantomData })
    }
}

impl fmt::Debug for CheckpointContents<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tensors, optimizers) = (self.tensors.len(), self.optimizers.len());
        write!(f, "CheckpointContents({tensors} tensors, {optimizers} optimizers)")
    }
}

/// A worker's part of the checkpoints of a name. It keeps its tensors and optimizers, and lasts
/// until [`remove`](CheckpointPart::remove), or as long as the worker, also when this is dropped.
///
/// ```
/// # fn f(worker: &distgrad::Worker, weight: &distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::{CheckpointContents, CheckpointPart};
/// let contents = CheckpointContents::new().tensors([("weight", weight)]);
/// let part: CheckpointPart = contents.create(worker, "model")?;
/// // ... a manager saves and loads ...
/// part.remove()?; // the worker may create another one of that name
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_checkpoint_part")]
#[doc(alias = "dg_checkpoint_part_destroy")]
pub struct CheckpointPart<'w> {
    handle: Owned<CheckpointPartHandle>,
    lifetime: PhantomData<&'w Worker>,
}

impl CheckpointPart<'_> {
    /// Removes the part: when this has returned, no save or load touches its tensors or calls its
    /// functions, and the worker may create another one of that name. A save or load that runs
    /// fails. Idempotent. Waits for what runs.
    ///
    /// `Code::FailedPrecondition` in `save_values` and `load_values` of the part, and once
    /// [`Worker::close`] has begun: that ends the part.
    #[doc(alias = "dg_checkpoint_part_remove")]
    pub fn remove(&self) -> Result<()> {
        Ok(ffi::checkpoint_part_remove(self.handle.get())?)
    }
}

impl fmt::Debug for CheckpointPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CheckpointPart")
    }
}

/// The options of a [`CheckpointManager`], each with a default.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::CheckpointManagerOptions;
/// let checkpoints = CheckpointManagerOptions::new().keep(10).create(worker, "/shared/run7")?;
/// let saving = checkpoints.save_async(1000, None)?; // writes while training goes on
/// // ... steps ...
/// saving.wait()?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_checkpoint_manager_options")]
#[derive(Clone, Debug, Default)]
pub struct CheckpointManagerOptions {
    name: String,
    workers: Vec<String>,
    keep: u64,
    allow_dropping: bool,
}

impl CheckpointManagerOptions {
    /// All default.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets the name of the parts. Default: the empty one.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
    /// Sets which workers have a part. Default: all, as of each save and load.
    pub fn workers(mut self, workers: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.workers = workers.into_iter().map(Into::into).collect();
        self
    }
    /// Sets how many checkpoints stay in the folder, the newest ones. Default, and 0: 3.
    pub fn keep(mut self, keep: u64) -> Self {
        self.keep = keep;
        self
    }
    /// Sets whether a save may lack tensors or optimizers' states that the last checkpoint has (the
    /// one that the manager has loaded, until it saves; else the newest), or have those of a worker
    /// that was started again since the last save or load and not loaded, or those that a load has
    /// left which failed when some of it may have been loaded. Else it is refused: their worker is
    /// gone, or a part forgets them, and older checkpoints are removed. Default: false.
    #[doc(alias = "DG_CHECKPOINT_ALLOW_DROPPING")]
    pub fn allow_dropping(mut self, allow_dropping: bool) -> Self {
        self.allow_dropping = allow_dropping;
        self
    }

    /// Creates the manager, and the folder, if need be; all workers have to see it under this path.
    /// It is locked until the manager is dropped: `Code::Aborted`, with host and process, if
    /// another manager has it. The worker need not have a part.
    #[doc(alias = "dg_checkpoint_manager_create")]
    pub fn create<'w>(
        &self,
        worker: &'w Worker,
        folder: impl AsRef<Path>,
    ) -> Result<CheckpointManager<'w>> {
        let folder = text_of_path(folder.as_ref())?;
        let handle =
            self.with_raw(|raw| ffi::checkpoint_manager_create(worker.handle(), folder, raw))?;
        Ok(CheckpointManager { handle: Owned::new(handle), lifetime: PhantomData })
    }

    fn with_raw<T>(&self, use_raw: impl FnOnce(&RawCheckpointManagerOptions<'_>) -> T) -> T {
        let workers: Vec<&str> = self.workers.iter().map(String::as_str).collect();
        use_raw(&RawCheckpointManagerOptions {
            name: &self.name,
            workers: &workers,
            keep: self.keep,
            allow_dropping: self.allow_dropping,
        })
    }
}

/// Which checkpoint is loaded, and how; each with a default.
///
/// ```
/// # fn f(checkpoints: &distgrad::CheckpointManager) -> distgrad::Result<()> {
/// use distgrad::LoadOptions;
/// let loaded = checkpoints.load(&LoadOptions::new().fall_back(true))?;
/// println!("going on from step {}", loaded.step);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_checkpoint_load_options")]
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    step: Option<i64>,
    not_strict: bool,
    fall_back: bool,
    timeout: Option<Duration>,
}

impl LoadOptions {
    /// The checkpoint that was saved last, strictly.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets the step of the checkpoint. Default: the one that was saved last.
    pub fn step(mut self, step: i64) -> Self {
        self.step = Some(step);
        self
    }
    /// Sets whether it is an error, and nothing is loaded, if something is missing in the
    /// checkpoint, unexpected in it, of another dtype or shape, or shares memory with what has
    /// other values. Else that stays as it is, and is listed; of what shares memory the first by
    /// its name is loaded. Default: true.
    #[doc(alias = "DG_CHECKPOINT_LOAD_NOT_STRICT")]
    pub fn strict(mut self, strict: bool) -> Self {
        self.not_strict = !strict;
        self
    }
    /// Sets whether a damaged checkpoint, or one of which a file is not there, is passed over for
    /// the one before it. Else it is an error, as is, in any case, a file that cannot be read: it
    /// may be good. Default: false.
    #[doc(alias = "DG_CHECKPOINT_LOAD_FALL_BACK")]
    pub fn fall_back(mut self, fall_back: bool) -> Self {
        self.fall_back = fall_back;
        self
    }
    /// Sets the timeout. Default: none.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    fn raw(&self) -> Result<RawLoadOptions> {
        // A negative one asks for the newest.
        if let Some(step @ ..0) = self.step {
            return Err(crate::Error::new(
                crate::Code::NotFound,
                format!("there is no checkpoint of step {step}"),
            ));
        }
        Ok(RawLoadOptions {
            step: self.step.unwrap_or(-1),
            timeout_ms: milliseconds_or_default(self.timeout),
            not_strict: self.not_strict,
            fall_back: self.fall_back,
        })
    }
}

/// What was loaded.
///
/// ```
/// # fn f(checkpoints: &distgrad::CheckpointManager) -> distgrad::Result<()> {
/// use distgrad::{LoadOptions, LoadedCheckpoint};
/// let loaded: LoadedCheckpoint = checkpoints.load(&LoadOptions::new().strict(false))?;
/// for text in loaded.missing.iter().chain(&loaded.mismatched) {
///     eprintln!("not loaded: {text}");
/// }
/// println!("step {}, from {}", loaded.step, loaded.folder.display());
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_loaded_checkpoint")]
#[doc(alias = "dg_loaded_checkpoint_step")]
#[doc(alias = "dg_loaded_checkpoint_folder")]
#[doc(alias = "dg_loaded_checkpoint_count")]
#[doc(alias = "dg_loaded_checkpoint_item")]
#[doc(alias = "dg_loaded_checkpoint_destroy")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadedCheckpoint {
    /// The step at which it was saved.
    pub step: i64,
    /// The folder of the checkpoint.
    pub folder: PathBuf,
    /// What is missing in the checkpoint: texts for people, each with the name of the tensor or the
    /// optimizer, as in the other lists. All three are empty if the load was strict.
    pub missing: Vec<String>,
    /// What the checkpoint has, and nobody asked for.
    pub unexpected: Vec<String>,
    /// What has another dtype or shape, or shares memory with what has other values.
    pub mismatched: Vec<String>,
}

impl From<RawLoadedCheckpoint> for LoadedCheckpoint {
    fn from(raw: RawLoadedCheckpoint) -> Self {
        Self {
            step: raw.step,
            folder: raw.folder.into(),
            missing: raw.missing,
            unexpected: raw.unexpected,
            mismatched: raw.mismatched,
        }
    }
}

/// Saves and loads what all parts of one name have. [`CheckpointContents`] has an example with parts.
///
/// Dropping it waits for what [`save_async`](CheckpointManager::save_async) writes, and unlocks the
/// folder; in the callback of a future a thread of the library does that.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{CheckpointManager, CheckpointManagerOptions, LoadOptions};
/// let options = CheckpointManagerOptions::new();
/// let checkpoints: CheckpointManager = options.create(worker, "/shared/run7")?;
/// let step = checkpoints.load(&LoadOptions::new())?.step;
/// // ... a hundred steps ...
/// checkpoints.save(step + 100, None)?; // without a timeout
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_checkpoint_manager")]
#[doc(alias = "dg_checkpoint_manager_destroy")]
pub struct CheckpointManager<'w> {
    handle: Owned<CheckpointManagerHandle>,
    lifetime: PhantomData<&'w Worker>,
}

impl CheckpointManager<'_> {
    /// Saves what all parts have at `step`, which is not negative. Waits until it is durable;
    /// `None`: without a timeout. Nobody may write to the tensors meanwhile, so this is for between
    /// two steps. After an error, which names the worker, the checkpoints that were there are still
    /// there.
    ///
    /// `Code::FailedPrecondition`, with a list, if it would lack what the last checkpoint has, if a
    /// worker has come back since this manager's last save or load (also a load that found no
    /// checkpoint) and was not loaded, if its last load has failed when some of it may have been
    /// loaded ([`allow_dropping`](CheckpointManagerOptions::allow_dropping) allows these), if
    /// replicas differ, and if a worker has no part; `Code::AlreadyExists` if somebody else's
    /// folder has the name of that step; the error of a `save_values`.
    #[doc(alias = "dg_checkpoint_manager_save")]
    pub fn save(&self, step: i64, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(ffi::checkpoint_manager_save(self.handle.get(), step, timeout)?)
    }

    /// Waits only until all parts have copied theirs to memory on the CPU, when training may go on.
    /// It is then written in the background, and the future is done when it is durable. If a save
    /// before it is not written yet, waits for that first. The timeout is for all of this, until it
    /// is durable. Cancelling the future has no effect. The end of the worker makes what is being
    /// written fail, and waits for that.
    #[doc(alias = "dg_checkpoint_manager_save_async")]
    pub fn save_async(
        &self,
        step: i64,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Future<()>> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(Future::own(ffi::checkpoint_manager_save_async(self.handle.get(), step, timeout)?))
    }

    /// Loads onto the workers what their parts ask for, each tensor by its name from whichever
    /// worker saved it: so there may be other workers than there were, with other parts of the
    /// model, on other devices. Waits. All checksums are verified, on all workers, before anything
    /// is loaded; if one is lost after that, or its `load_values` fails, some may have been loaded.
    ///
    /// `Code::NotFound` only if there is no checkpoint, or none of that step: one may begin at step
    /// 0. `Code::FailedPrecondition` if a worker has no part; `Code::DataLoss` if it is damaged,
    /// with the file, the tensor, and which step could be loaded instead; `Code::InvalidArgument`
    /// with a list of what does not fit; the error of a `load_values`; what the operating system
    /// says of a file that cannot be read.
    #[doc(alias = "dg_checkpoint_manager_load")]
    pub fn load(&self, options: &LoadOptions) -> Result<LoadedCheckpoint> {
        Ok(ffi::checkpoint_manager_load(self.handle.get(), options.raw()?)?.into())
    }
}

impl fmt::Debug for CheckpointManager<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CheckpointManager")
    }
}

/// The same as [`CheckpointManager::load`], without a manager and its lock: for a job that loads what
/// another one saves. Of the second options the name and the workers count.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{load_checkpoint, CheckpointManagerOptions, LoadOptions};
/// let of = CheckpointManagerOptions::new().name("model").workers(["worker0", "worker1"]);
/// let loaded = load_checkpoint(worker, "/shared/run7", &LoadOptions::new(), &of)?;
/// println!("step {} of {}", loaded.step, loaded.folder.display());
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_checkpoint_load")]
pub fn load_checkpoint(
    worker: &Worker,
    folder: impl AsRef<Path>,
    options: &LoadOptions,
    of: &CheckpointManagerOptions,
) -> Result<LoadedCheckpoint> {
    let (folder, options) = (text_of_path(folder.as_ref())?, options.raw()?);
    let loaded = of.with_raw(|of| ffi::load_checkpoint(worker.handle(), folder, options, of))?;
    Ok(loaded.into())
}
