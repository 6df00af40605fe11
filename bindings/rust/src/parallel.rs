//! Data parallel: one function on several devices.
use crate::{
    error::BoxedError,
    ffi::{
        self, DataParallelHandle, Forward, Owned, RawDataParallelOptions, RawReplica, TensorHandle,
    },
    future::milliseconds_or_default,
    message::handles_of,
    Code, Error, Result, Tensor,
};
use std::{borrow::Borrow, fmt, time::Duration};

/// The options of a [`DataParallel`], each with a default.
///
/// ```
/// use distgrad::{DataParallelOptions, Tensor};
/// let weight = Tensor::from_slice(&[1.0f32, 10.0], &[1, 2])?.require_grad()?;
/// let parallel = DataParallelOptions::new()
///     .devices(["cpu", "cpu"]) // or "cuda:0", "cuda:1"
///     .dim(1) // a column for each element of the batch
///     .create([&weight], |replica| Ok([replica.parameter(0)?.matmul(replica.input(0)?)?]))?;
/// let batch = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
/// assert_eq!(parallel.forward([&batch])?.to_vec::<f32>()?, [41.0, 52.0, 63.0]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_data_parallel_options")]
#[derive(Clone, Debug, Default)]
pub struct DataParallelOptions {
    devices: Vec<String>,
    output_device: String,
    dim: i64,
    buffers: Vec<Tensor>,
    bucket_bytes: u64,
    timeout: Option<Duration>,
}

impl DataParallelOptions {
    /// All default: all CUDA devices.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets the devices: `cpu`, `cuda:1`; one may be there several times. Default: all CUDA
    /// devices.
    pub fn devices(mut self, devices: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.devices = devices.into_iter().map(Into::into).collect();
        self
    }
    /// Sets the device on which outputs are put together. Default: the first of the devices.
    pub fn output_device(mut self, device: impl Into<String>) -> Self {
        self.output_device = device.into();
        self
    }
    /// Sets the dimension along which inputs are split and outputs put together. Default: 0.
    pub fn dim(mut self, dim: i64) -> Self {
        self.dim = dim;
        self
    }
    /// Sets the tensors that the function writes to, as batch norm does to its statistics; those of
    /// replica 0 are kept. Default: none.
    pub fn buffers(mut self, buffers: impl IntoIterator<Item = impl Borrow<Tensor>>) -> Self {
        self.buffers = buffers.into_iter().map(|buffer| buffer.borrow().clone()).collect();
        self
    }
    /// Sets the size of the largest bucket of gradients that are added at once. Default: 25 MiB.
    pub fn bucket_bytes(mut self, bytes: u64) -> Self {
        self.bucket_bytes = bytes;
        self
    }
    /// Sets the timeout of a reduction between GPUs. Default: ten minutes.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Creates replicas, threads and buckets, which last until it is dropped. Parameters and
    /// buffers lie on one device, which need not be one of the list, and stay the caller's tensors:
    /// replicas follow their values. `function` returns as many outputs as it is asked for, each a
    /// `Tensor` or an `Option<Tensor>`.
    #[doc(alias = "dg_data_parallel_create")]
    pub fn create<F, O>(
        &self,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
        function: F,
    ) -> Result<DataParallel>
    where
        F: Fn(&Replica) -> std::result::Result<O, BoxedError> + Send + Sync + 'static,
        O: IntoIterator<Item: Into<Option<Tensor>>>,
    {
        let (_parameters, parameters) = handles_of(parameters);
        let (_buffers, buffers) = handles_of(&self.buffers);
        let devices: Vec<&str> = self.devices.iter().map(String::as_str).collect();
        let options = RawDataParallelOptions {
            devices: &devices,
            output_device: &self.output_device,
            dim: self.dim,
            buffers: &buffers,
            bucket_bytes: self.bucket_bytes,
            timeout_ms: milliseconds_or_default(self.timeout),
        };
        let forward = Forward::new(move |replica| {
            Ok(function(replica)?.into_iter().map(Into::into).collect())
        });
        Ok(DataParallel(Owned::new(ffi::data_parallel_create(&parameters, &options, forward)?)))
    }
}

/// One function on several devices, each with a part of the batch and with the same parameters;
/// backward adds up their gradients.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use distgrad::{DataParallelOptions, Tensor};
/// let weight = Tensor::from_slice(&[1.0f32, 2.0], &[2, 1])?.require_grad()?;
/// let parallel = DataParallelOptions::new()
///     .devices(["cpu", "cpu"]) // or "cuda:0", "cuda:1"
///     .create([&weight], |replica| Ok([replica.input(0)?.matmul(replica.parameter(0)?)?]))?;
/// let batch = Tensor::from_slice(&[1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0], &[3, 2])?;
/// assert_eq!(parallel.forward([&batch])?.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_data_parallel")]
#[doc(alias = "dg_data_parallel_destroy")]
pub struct DataParallel(Owned<DataParallelHandle>);

impl DataParallel {
    /// Splits the inputs, runs the function for all replicas at the same time, each on a thread of
    /// its own, waits for all, and puts their only output together.
    ///
    /// All inputs have to give the same number of parts; a batch smaller than the list of devices
    /// leaves some of them idle. The replicas' first error, by the list, keeps its code and names
    /// replica and device; a panic is one with `Code::Internal`. `Code::FailedPrecondition` while
    /// another forward of it is in flight.
    pub fn forward(&self, inputs: impl IntoIterator<Item = impl Borrow<Tensor>>) -> Result<Tensor> {
        let (_inputs, inputs) = handles_of(inputs);
        let output = self.run(&inputs, 1)?.pop().flatten();
        output.ok_or_else(|| Error::invalid("the function gave no tensor"))
    }

    /// The same with several outputs. An input or output that is `None` stays `None`.
    #[doc(alias = "dg_data_parallel_forward")]
    pub fn forward_all(
        &self,
        inputs: &[Option<&Tensor>],
        output_count: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let inputs: Vec<_> = inputs.iter().map(|&input| Tensor::handle_or_null(input)).collect();
        self.run(&inputs, output_count)
    }

    fn run(&self, inputs: &[TensorHandle], count: usize) -> Result<Vec<Option<Tensor>>> {
        let outputs = ffi::data_parallel_forward(self.0.get(), inputs, count)?;
        Ok(outputs.into_iter().map(Tensor::own_or_none).collect())
    }
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataParallel")
    }
}

fn beyond(what: &str, index: usize) -> Error {
    Error::new(Code::OutOfRange, format!("there is no {what} at place {index}"))
}

/// What the function of a [`DataParallel`] gets for one replica.
///
/// ```
/// use distgrad::{DataParallelOptions, Replica, Tensor};
/// let weight = Tensor::from_slice(&[2.0f32], &[1])?.require_grad()?;
/// let options = DataParallelOptions::new().devices(["cpu", "cpu"]);
/// let parallel = options.create([&weight], |replica: &Replica| {
///     println!("replica {} on {}", replica.index(), replica.device());
///     Ok([replica.input(0)?.mul(replica.parameter(0)?)?])
/// })?;
/// let batch = Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3])?;
/// assert_eq!(parallel.forward([&batch])?.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_replica")]
#[derive(Debug)]
pub struct Replica {
    index: usize,
    device: String,
    parameters: Vec<Tensor>,
    buffers: Vec<Tensor>,
    inputs: Vec<Option<Tensor>>,
}

impl Replica {
    pub(crate) fn new(raw: &RawReplica<'_>) -> Result<Self> {
        let shared = |handles: &[TensorHandle]| -> Result<Vec<Option<Tensor>>> {
            handles.iter().copied().map(Tensor::share).collect()
        };
        Ok(Self {
            index: raw.index as usize,
            device: String::from_utf8_lossy(raw.device).into_owned(),
            // None of these two is without a tensor.
            parameters: shared(raw.parameters)?.into_iter().flatten().collect(),
            buffers: shared(raw.buffers)?.into_iter().flatten().collect(),
            inputs: shared(raw.inputs)?,
        })
    }

    /// Returns its index in the list of devices.
    pub fn index(&self) -> usize {
        self.index
    }
    /// Returns its device, `cpu` or `cuda:1`, which is the thread's current one.
    pub fn device(&self) -> &str {
        &self.device
    }
    /// Returns the parameters, on the device.
    pub fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }
    /// Returns one of the parameters; `Code::OutOfRange` beyond the last.
    pub fn parameter(&self, index: usize) -> Result<&Tensor> {
        self.parameters.get(index).ok_or_else(|| beyond("parameter", index))
    }
    /// Returns the buffers, on the device.
    pub fn buffers(&self) -> &[Tensor] {
        &self.buffers
    }
    /// Returns its part of each input; `None` where none was given.
    pub fn inputs(&self) -> &[Option<Tensor>] {
        &self.inputs
    }
    /// Returns its part of one input; `Code::OutOfRange` beyond the last, and where none was given.
    pub fn input(&self, index: usize) -> Result<&Tensor> {
        self.inputs.get(index).and_then(Option::as_ref).ok_or_else(|| beyond("input", index))
    }
}

/// Splits a tensor along `dim`: part i is on `devices[i]`, and of `sizes[i]`, or as large as the
/// others, as far as possible. A short `dim` gives fewer parts, and one at least. Autograd records
/// it.
///
/// `Code::InvalidArgument` for no device, or one that is not there, and for a `dim` or sizes that
/// do not fit.
///
/// ```
/// use distgrad::{gather, scatter, Tensor};
/// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3])?;
/// let parts = scatter(&x, &["cpu", "cpu"], 0, None)?; // or "cuda:0", "cuda:1"
/// assert_eq!(parts[0].to_vec::<f32>()?, [1.0, 2.0]);
/// assert_eq!(gather(&parts, None, 0)?.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_scatter")]
pub fn scatter(
    tensor: &Tensor,
    devices: &[&str],
    dim: i64,
    sizes: Option<&[i64]>,
) -> Result<Vec<Tensor>> {
    if sizes.is_some_and(|sizes| sizes.len() != devices.len()) {
        return Err(Error::invalid("there is not one size for each device"));
    }
    let parts = ffi::scatter(tensor.handle(), devices, dim, sizes.unwrap_or_default())?;
    Ok(parts.into_iter().map(Tensor::own).collect())
}

/// Concatenates tensors along `dim`, on a device (`None`: that of the first tensor). Tensors of no
/// dimensions give a vector. Autograd records it. Errors as of [`scatter`].
///
/// ```
/// use distgrad::{gather, Tensor};
/// let one = Tensor::from_slice(&[1.0f32], &[1])?;
/// let two = Tensor::from_slice(&[2.0f32, 3.0], &[2])?;
/// assert_eq!(gather([&one, &two], Some("cpu"), 0)?.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_gather")]
pub fn gather(
    tensors: impl IntoIterator<Item = impl Borrow<Tensor>>,
    device: Option<&str>,
    dim: i64,
) -> Result<Tensor> {
    let (_tensors, handles) = handles_of(tensors);
    Ok(Tensor::own(ffi::gather(&handles, device.unwrap_or_default(), dim)?))
}

/// Copies tensors to each device, in few large pieces: the result has one list for each device. The
/// tensors lie on one device. Autograd records it. Errors as of [`scatter`].
///
/// ```
/// use distgrad::{broadcast, reduce_add, Tensor};
/// let x = Tensor::from_slice(&[1.0f32, 2.0], &[2])?;
/// let copies = broadcast([&x], &["cpu", "cpu"])?;
/// let lists: Vec<Vec<_>> = copies.into_iter().map(|list| list.into_iter().map(Some).collect()).collect();
/// let sums = reduce_add(&lists, None)?;
/// assert_eq!(sums[0].as_ref().unwrap().to_vec::<f32>()?, [2.0, 4.0]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_broadcast")]
pub fn broadcast(
    tensors: impl IntoIterator<Item = impl Borrow<Tensor>>,
    devices: &[&str],
) -> Result<Vec<Vec<Tensor>>> {
    let (_tensors, handles) = handles_of(tensors);
    let mut copies = ffi::broadcast(&handles, devices)?.into_iter().map(Tensor::own);
    Ok(devices.iter().map(|_| copies.by_ref().take(handles.len()).collect()).collect())
}

/// Adds up lists of tensors, the reverse of [`broadcast`]: the first tensors of all lists, the
/// second ones, and so on, on a device (`None`: that of the first tensor). Each list lies on one
/// device. A `None` counts as zeros; a sum of nothing but `None` is `None`. Autograd records it.
///
/// `Code::InvalidArgument` if the lists are not of one length; otherwise errors as of [`scatter`].
///
/// ```
/// use distgrad::{reduce_add, Tensor};
/// let one = Tensor::from_slice(&[1.0f32, 2.0], &[2])?;
/// let two = Tensor::from_slice(&[3.0f32, 4.0], &[2])?;
/// let sums = reduce_add(&[vec![Some(one), None], vec![Some(two), None]], None)?;
/// assert_eq!(sums[0].as_ref().unwrap().to_vec::<f32>()?, [4.0, 6.0]);
/// assert!(sums[1].is_none());
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_reduce_add")]
pub fn reduce_add(
    lists: &[Vec<Option<Tensor>>],
    device: Option<&str>,
) -> Result<Vec<Option<Tensor>>> {
    if lists.windows(2).any(|pair| pair[0].len() != pair[1].len()) {
        return Err(Error::invalid("the lists are not of one length"));
    }
    let handles: Vec<_> =
        lists.iter().flatten().map(|one| Tensor::handle_or_null(one.as_ref())).collect();
    let sums = ffi::reduce_add(&handles, lists.len(), device.unwrap_or_default())?;
    Ok(sums.into_iter().map(Tensor::own_or_none).collect())
}
