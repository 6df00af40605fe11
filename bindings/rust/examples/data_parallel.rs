//! Trains one model on several devices of this machine, on Fashion-MNIST: each device has the same
//! parameters and a part of every batch, and backward adds up their gradients. Here the CPU is
//! in the list twice; "cuda:0", "cuda:1" and so on need no other change.
//!
//! `data_parallel [FOLDER [IMAGES]]`; FOLDER has the four `*-ubyte.gz` files.
mod fashion_mnist;

use distgrad::{DataParallel, DataParallelOptions, NoGrad, Result, Sgd, Tensor, WorkerOptions};
use fashion_mnist::{accuracy, parameter, Dataset, CLASSES, FOLDER, PIXELS};
use indicatif::ProgressIterator;
use std::{env, error::Error};

const DEVICES: [&str; 2] = ["cpu", "cpu"];
const HIDDEN: usize = 64;
const BATCH: usize = 50;
const TESTS: usize = 1000;

/// The model on some devices, with parameters that the caller keeps.
fn model(devices: &[&str], parameters: &[Tensor]) -> Result<DataParallel> {
    DataParallelOptions::new().devices(devices.iter().copied()).create(parameters, |replica| {
        let [first, first_bias, last, last_bias] = replica.parameters() else {
            return Err("the model has four parameters".into());
        };
        let hidden = replica.input(0)?.linear(first, Some(first_bias))?.relu()?;
        Ok([hidden.linear(last, Some(last_bias))?])
    })
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| FOLDER.into());
    let count = arguments.next().map_or(Ok(60_000), |count| count.parse())?;

    // A job of one worker: for a context to go backward in, and an optimizer.
    let worker = WorkerOptions::new().create()?;
    let [pixels, hidden, classes] = [PIXELS as i64, HIDDEN as i64, CLASSES as i64];
    let parameters = [
        parameter(&[hidden, pixels], 0.03)?,
        parameter(&[hidden], 0.03)?,
        parameter(&[classes, hidden], 0.12)?,
        parameter(&[classes], 0.12)?,
    ];
    let optimizer = Sgd::new(0.05).momentum(0.9).create(&worker, "", &parameters)?;
    let [one, all] = [model(&DEVICES[..1], &parameters)?, model(&DEVICES, &parameters)?];

    let data = Dataset::load(&folder, "train", count)?;
    for batch in (0..data.len() / BATCH).progress() {
        let (images, labels) = data.batch(batch * BATCH, BATCH)?;
        let context = worker.context()?;
        let loss = all.forward([&images])?.cross_entropy_loss(&labels)?;
        context.backward([&loss])?;
        if batch == 0 {
            // The same step on one device.
            let alone = worker.context()?;
            alone.backward([one.forward([&images])?.cross_entropy_loss(&labels)?])?;
            for parameter in &parameters {
                let difference = context.gradient(parameter)?.sub(&alone.gradient(parameter)?)?;
                assert!(difference.abs()?.max()?.item::<f32>()? < 1e-5, "{parameter:?}");
            }
        }
        optimizer.step(&context)?;
    }

    let _no_grad = NoGrad::new();
    let (images, labels) = Dataset::load(&folder, "t10k", TESTS)?.batch(0, TESTS)?;
    let right = accuracy(&all.forward([&images])?, &labels)?;
    println!("{:.1} % of {TESTS} images that it never saw are right", 100.0 * right);
    assert!(right > 0.7, "guessing gives 0.1");
    Ok(())
}
