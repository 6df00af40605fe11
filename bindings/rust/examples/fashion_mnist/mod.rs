//! Fashion-MNIST: images of clothes, 28 x 28 grey pixels, in ten classes (Xiao, Rasul and Vollgraf,
//! arXiv:1708.07747), out of four gzipped IDX files.
#![allow(dead_code)] // each example uses a part of it
use distgrad::{Result as DistgradResult, Tensor};
use flate2::read::GzDecoder;
use std::{
    error::Error,
    fs::File,
    io::{self, Read},
    path::Path,
};

pub const PIXELS: usize = 28 * 28;
pub const CLASSES: usize = 10;

/// Where Debian's package dataset-fashion-mnist puts them.
pub const FOLDER: &str = "/usr/share/datasets/fashion-mnist";

/// Images and their labels, in the order of the files.
pub struct Dataset {
    pixels: Vec<f32>, // about 0
    labels: Vec<i64>,
}

impl Dataset {
    /// The first `count` images of `train` or of `t10k`.
    pub fn load(folder: &str, part: &str, count: usize) -> Result<Self, Box<dyn Error>> {
        let pixels = unpack(folder, &format!("{part}-images-idx3-ubyte.gz"), 16, count * PIXELS)?;
        let labels = unpack(folder, &format!("{part}-labels-idx1-ubyte.gz"), 8, count)?;
        Ok(Self {
            pixels: pixels.into_iter().map(|pixel| f32::from(pixel) / 255.0 - 0.5).collect(),
            labels: labels.into_iter().map(i64::from).collect(),
        })
    }

    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Images `[count, 784]` of float32 and labels `[count]` of int64, from `first` on.
    pub fn batch(&self, first: usize, count: usize) -> DistgradResult<(Tensor, Tensor)> {
        let pixels = &self.pixels[first * PIXELS..(first + count) * PIXELS];
        let labels = &self.labels[first..first + count];
        let rows = count as i64;
        let images = Tensor::from_slice(pixels, &[rows, PIXELS as i64])?;
        Ok((images, Tensor::from_slice(labels, &[rows])?))
    }
}

/// `size` bytes of a file, behind its header.
fn unpack(folder: &str, name: &str, header: usize, size: usize) -> Result<Vec<u8>, Box<dyn Error>> {
    let path = Path::new(folder).join(name);
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; header + size];
        GzDecoder::new(File::open(&path)?).read_exact(&mut bytes)?;
        Ok(bytes.split_off(header))
    };
    read().map_err(|error| format!("cannot read {}: {error}", path.display()).into())
}

/// A parameter with small numbers that differ.
pub fn parameter(shape: &[i64], range: f32) -> DistgradResult<Tensor> {
    let mut random: u32 = 12345;
    let count = shape.iter().product::<i64>() as usize;
    let data = (0..count).map(|_| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((random >> 8) as f32 / (1 << 24) as f32 * 2.0 - 1.0) * range
    });
    Tensor::from_vec(data.collect(), shape)?.require_grad()
}

/// The share of scores `[n, classes]` whose largest is at the label.
pub fn accuracy(scores: &Tensor, labels: &Tensor) -> DistgradResult<f64> {
    let (found, labels) = (scores.argmax(1)?.to_vec::<i64>()?, labels.to_vec::<i64>()?);
    let right = found.iter().zip(&labels).filter(|(found, label)| found == label).count();
    Ok(right as f64 / labels.len() as f64)
}
