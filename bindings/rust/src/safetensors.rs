//! Files of tensors, as Python's `safetensors` and what builds on it read and write them.
use crate::{
    ffi::{self, Owned, RawSafetensorsInfo, SafetensorsFileHandle},
    message::handles_of,
    Dtype, Error, Result, Tensor,
};
use std::{borrow::Borrow, collections::BTreeMap, fmt, path::Path};

/// The library takes paths as text.
pub(crate) fn text_of_path(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::invalid(format!("{} is not UTF-8", path.display())))
}

/// Writes tensors, of whichever devices, and metadata to a safetensors file: all or nothing, and
/// when this has returned on the disk. Tensors that share memory are each written in full. Nobody
/// may write to them meanwhile. docs/checkpoints.md says what a file has of a tensor.
///
/// ```
/// # fn main() -> distgrad::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("distgrad-doc-files-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # let path = folder.join("model.safetensors");
/// let weight = distgrad::Tensor::from_slice(&[1.0f32, 2.0], &[2])?;
/// distgrad::save_safetensors(&path, [("weight", &weight)], [("format", "pt")])?;
/// let tensors = distgrad::load_safetensors(&path)?;
/// assert_eq!(tensors["weight"].to_vec::<f32>()?, [1.0, 2.0]);
/// # std::fs::remove_dir_all(folder).unwrap();
/// # Ok(())
/// # }
/// ```
///
/// `Code::InvalidArgument` for a name that is there twice, and for tensors that are not dense, or of
/// a dtype that the format lacks; `Code::Aborted` while another save to that path is in flight; else
/// errors of the operating system, which leave the file as it was.
#[doc(alias = "dg_safetensors_save")]
pub fn save_safetensors(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (impl AsRef<str>, impl Borrow<Tensor>)>,
    metadata: impl IntoIterator<Item = (impl AsRef<str>, impl AsRef<str>)>,
) -> Result<()> {
    let (names, tensors): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    let (_tensors, handles) = handles_of(tensors);
    let (keys, values): (Vec<_>, Vec<_>) = metadata.into_iter().unzip();
    let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
    let values: Vec<&str> = values.iter().map(AsRef::as_ref).collect();
    Ok(ffi::safetensors_save(text_of_path(path.as_ref())?, &names, &handles, &keys, &values)?)
}

/// Reads all tensors of a file, onto the CPU. The file may come from anybody: `Code::InvalidArgument`
/// if it is none, or a damaged one; else errors of the operating system.
///
/// ```
/// # fn f() -> distgrad::Result<()> {
/// for (name, tensor) in distgrad::load_safetensors("model.safetensors")? {
///     println!("{name}: {tensor:?}");
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_safetensors_load")]
pub fn load_safetensors(path: impl AsRef<Path>) -> Result<BTreeMap<String, Tensor>> {
    let tensors = ffi::safetensors_load(text_of_path(path.as_ref())?)?;
    Ok(tensors.into_iter().map(|each| (each.name, Tensor::own(each.tensor))).collect())
}

/// Writes what is in a file to tensors, on whichever devices and with whichever strides. Converts
/// nothing. `Code::InvalidArgument`, and nothing is written, also lists what is missing in the file,
/// what is unexpected in it, what has another dtype or shape, and what shares memory with another
/// tensor for which the file has other values.
///
/// ```
/// # fn f(weight: &distgrad::Tensor, bias: &distgrad::Tensor) -> distgrad::Result<()> {
/// distgrad::load_safetensors_into("model.safetensors", [("weight", weight), ("bias", bias)])
/// # }
/// ```
#[doc(alias = "dg_safetensors_load_into")]
pub fn load_safetensors_into(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (impl AsRef<str>, impl Borrow<Tensor>)>,
) -> Result<()> {
    let (names, tensors): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    let (_tensors, handles) = handles_of(tensors);
    Ok(ffi::safetensors_load_into(text_of_path(path.as_ref())?, &names, &handles)?)
}

/// A tensor in a file.
///
/// ```
/// # fn f(file: &distgrad::SafetensorsFile) -> distgrad::Result<()> {
/// use distgrad::SafetensorsInfo;
/// let bytes: u64 = file.tensors()?.values().map(|info: &SafetensorsInfo| info.bytes).sum();
/// println!("{bytes} bytes of elements");
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_safetensors_info")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SafetensorsInfo {
    /// The type of its elements.
    pub dtype: Dtype,
    /// The size of each dimension.
    pub shape: Vec<i64>,
    /// How many bytes it has in the file.
    pub bytes: u64,
}

impl From<RawSafetensorsInfo> for SafetensorsInfo {
    fn from(raw: RawSafetensorsInfo) -> Self {
        Self { dtype: Dtype::from_code(raw.dtype as i32), shape: raw.shape, bytes: raw.bytes }
    }
}

/// A file of tensors that is open: its header is in memory, and each tensor is read when it is asked
/// for. It stays the same file if another one takes its name.
///
/// ```
/// # fn f() -> distgrad::Result<()> {
/// let file = distgrad::SafetensorsFile::open("model.safetensors")?;
/// for (name, info) in file.tensors()? {
///     println!("{name}: {} {:?}", info.dtype, info.shape);
/// }
/// let bias = file.read("bias")?; // of the rest nothing is read
/// # let _ = bias;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_safetensors_file")]
#[doc(alias = "dg_safetensors_file_destroy")]
pub struct SafetensorsFile(Owned<SafetensorsFileHandle>);

impl SafetensorsFile {
    /// Opens a file, and reads and checks its header. Errors as of [`load_safetensors`].
    #[doc(alias = "dg_safetensors_file_open")]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self(Owned::new(ffi::safetensors_file_open(text_of_path(path.as_ref())?)?)))
    }

    /// Returns its tensors, by name.
    #[doc(alias = "dg_safetensors_file_tensors")]
    pub fn tensors(&self) -> Result<BTreeMap<String, SafetensorsInfo>> {
        let tensors = ffi::safetensors_file_tensors(self.0.get())?;
        Ok(tensors.into_iter().map(|mut raw| (std::mem::take(&mut raw.name), raw.into())).collect())
    }

    /// Returns its metadata.
    #[doc(alias = "dg_safetensors_file_metadata")]
    #[doc(alias = "dg_entry")]
    pub fn metadata(&self) -> Result<BTreeMap<String, String>> {
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let metadata = ffi::safetensors_file_metadata(self.0.get())?;
        Ok(metadata.into_iter().map(|each| (each.name, text(&each.value))).collect())
    }

    /// Reads a tensor, onto the CPU. `Code::NotFound` if there is none of that name;
    /// `Code::DataLoss` if the file has become shorter since it was opened.
    #[doc(alias = "dg_safetensors_file_read")]
    pub fn read(&self, name: &str) -> Result<Tensor> {
        Ok(Tensor::own(ffi::safetensors_file_read(self.0.get(), name)?))
    }

    /// Writes what the file has under that name to a tensor, as [`load_safetensors_into`] does.
    /// After an error of the file some of it may have been written.
    #[doc(alias = "dg_safetensors_file_read_into")]
    pub fn read_into(&self, name: &str, tensor: &Tensor) -> Result<()> {
        Ok(ffi::safetensors_file_read_into(self.0.get(), name, tensor.handle())?)
    }
}

impl fmt::Debug for SafetensorsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SafetensorsFile")
    }
}
