//! Trains a model that is split over two processes, on Fashion-MNIST: its first layer lives with the
//! data in the front process, its second one in the back process. One call forward, one backward
//! through both, and one step of an optimizer on both, for each batch.
//!
//! `split [FOLDER [IMAGES]]`; FOLDER has the four `*-ubyte.gz` files.
mod fashion_mnist;
mod job;

use distgrad::{Context, Message, NoGrad, Optimizer, Result, Sgd, Tensor};
use fashion_mnist::{accuracy, parameter, Dataset, CLASSES, FOLDER, PIXELS};
use indicatif::{ProgressBar, ProgressStyle};
use job::{Job, MINUTE};
use std::{env, error::Error};

const HIDDEN: usize = 64;
const BATCH: usize = 50;
const TESTS: usize = 1000;

/// A linear layer.
#[derive(Clone)]
struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    fn new(inputs: usize, outputs: usize) -> Result<Self> {
        let (inputs, outputs) = (inputs as i64, outputs as i64);
        let range = (inputs as f32).sqrt().recip();
        Ok(Self {
            weight: parameter(&[outputs, inputs], range)?,
            bias: parameter(&[outputs], range)?,
        })
    }
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.linear(&self.weight, Some(&self.bias))
    }
}

/// The part with the data.
struct Front<'a> {
    job: &'a Job,
    layer: Linear,
    optimizer: Optimizer<'a>,
}

impl Front<'_> {
    // Takes one step over both processes, and returns the loss of the batch.
    fn step(&self, images: &Tensor, labels: &Tensor) -> Result<f32> {
        let context = self.job.worker.context()?;
        let scores = self.forward(&context, images)?;
        let loss = scores.cross_entropy_loss(labels)?;
        context.backward([&loss])?;
        self.optimizer.step(&context)?;
        loss.item()
    }

    fn forward(&self, context: &Context<'_>, images: &Tensor) -> Result<Tensor> {
        let hidden = self.layer.forward(images)?.relu()?;
        context.call("back", "classify", &Message::new("", [hidden])?)?.tensor(0)
    }

    fn train(&self, data: &Dataset) -> Result<()> {
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} batches, {eta} left, {msg}");
        let bar = ProgressBar::new((data.len() / BATCH) as u64)
            .with_style(style.expect("a template that is right"));
        for first in (0..data.len() + 1 - BATCH).step_by(BATCH) {
            let (images, labels) = data.batch(first, BATCH)?;
            bar.set_message(format!("loss {:.3}", self.step(&images, &labels)?));
            bar.inc(1);
        }
        bar.finish();
        Ok(())
    }

    fn test(&self, data: &Dataset) -> Result<f64> {
        let _no_grad = NoGrad::new();
        let (images, labels) = data.batch(0, data.len())?;
        let context = self.job.worker.context()?;
        accuracy(&self.forward(&context, &images)?, &labels)
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| FOLDER.into());
    let count = arguments.next().map_or(Ok(60_000), |count| count.parse())?;

    let job = Job::start(&["front", "back"])?;
    let layer = match job.is_first() {
        true => Linear::new(PIXELS, HIDDEN)?,
        false => Linear::new(HIDDEN, CLASSES)?,
    };
    let served = layer.clone();
    job.worker.register("classify", move |request| {
        Ok(Message::new("", [served.forward(&request.tensor(0)?)?])?)
    })?;
    let optimizer =
        Sgd::new(0.05).momentum(0.9).create(&job.worker, "", [&layer.weight, &layer.bias])?;
    job.worker.barrier(MINUTE)?; // both are ready

    if job.is_first() {
        let front = Front { job: &job, layer, optimizer };
        front.train(&Dataset::load(&folder, "train", count)?)?;
        let right = front.test(&Dataset::load(&folder, "t10k", TESTS)?)?;
        println!("{:.1} % of {TESTS} images that it never saw are right", 100.0 * right);
        assert!(right > 0.7, "guessing gives 0.1");
    }
    job.finish()
}
