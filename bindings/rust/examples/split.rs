//! Trains a model that is split over two processes, on Fashion-MNIST: its first layer lives with the
//! data in the front process, its second one in the back process. One call forward, one backward
//! through both, and one step of an optimizer on both, for each batch.
//!
//! `split [FOLDER [IMAGES]] [--checkpoint FOLDER [--every STEPS] [--resume]]`; the first FOLDER has
//! the four `*-ubyte.gz` files. With `--checkpoint` both processes save what they have every 200
//! steps, at the end, and on Ctrl-C; with `--resume` they go on where they were.
mod checkpoints;
mod fashion_mnist;
mod interrupt;
mod job;

use distgrad::{
    CheckpointContents, CheckpointManager, CheckpointManagerOptions, Context, Message, NoGrad,
    Optimizer, Result, Sgd, Tensor,
};
use fashion_mnist::{accuracy, parameter, Dataset, CLASSES, FOLDER, PIXELS};
use indicatif::{ProgressBar, ProgressStyle};
use job::{Job, MINUTE};
use std::{env, error::Error, process};

const HIDDEN: usize = 64;
const BATCH: usize = 50;
const TESTS: usize = 1000;

/// What the command line says.
struct Options {
    folder: String,
    images: usize,
    checkpoint: Option<String>,
    every: usize,
    resume: bool,
}

impl Options {
    fn read() -> std::result::Result<Self, Box<dyn Error>> {
        let mut options = Self {
            folder: FOLDER.into(),
            images: 60_000,
            checkpoint: None,
            every: 200,
            resume: false,
        };
        let (mut arguments, mut place) = (env::args().skip(1), 0);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} lacks its value"));
            match argument.as_str() {
                "--checkpoint" => options.checkpoint = Some(value()?),
                "--every" => options.every = value()?.parse()?,
                "--resume" => options.resume = true,
                _ if argument.starts_with("--") => {
                    return Err(format!("what is {argument}?").into())
                }
                _ => {
                    match place {
                        0 => options.folder = argument,
                        1 => options.images = argument.parse()?,
                        _ => return Err(format!("what is {argument}?").into()),
                    }
                    place += 1;
                }
            }
        }
        if options.every == 0 || (options.resume && options.checkpoint.is_none()) {
            return Err("--every is 1 at least, and --resume needs --checkpoint FOLDER".into());
        }
        if let (Some(folder), false) = (&options.checkpoint, options.resume) {
            checkpoints::check_is_new(folder)?;
        }
        Ok(options)
    }
}

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

    /// Trains on the batches from `done` on, and saves now and then.
    fn train(
        &self,
        data: &Dataset,
        done: usize,
        checkpoints: Option<(&CheckpointManager<'_>, usize)>,
    ) -> Result<()> {
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} batches, {eta} left, {msg}");
        let count = data.len() / BATCH;
        let bar = ProgressBar::new(count as u64)
            .with_style(style.expect("a template that is right"))
            .with_position(done as u64);
        for batch in done..count {
            let (images, labels) = data.batch(batch * BATCH, BATCH)?;
            bar.set_message(format!("loss {:.3}", self.step(&images, &labels)?));
            bar.inc(1);
            let Some((checkpoints, every)) = checkpoints else { continue };
            let step = batch + 1;
            // Asked once, so that none that comes during this ends it without its save.
            let is_last = step == count || interrupt::has_come();
            if step % every == 0 || is_last {
                checkpoints.save(step as i64, None)?;
                bar.suspend(|| println!("saved the checkpoint of step {step}"));
            }
            if is_last {
                break;
            }
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
    let options = Options::read()?;
    let job = Job::start(&["front", "back"])?;
    if options.checkpoint.is_some() {
        // Ctrl-C comes to both processes, and the back one is needed for a last checkpoint.
        interrupt::catch();
    }
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
    if options.checkpoint.is_some() {
        let name = if job.is_first() { "first" } else { "last" };
        CheckpointContents::new()
            .tensors([
                (format!("{name}.weight"), &layer.weight),
                (format!("{name}.bias"), &layer.bias),
            ])
            .optimizer("sgd", &optimizer)
            .create(&job.worker, "")?;
    }
    job.worker.barrier(MINUTE)?; // both are ready

    if job.is_first() {
        let checkpoints = match &options.checkpoint {
            Some(to) => Some(CheckpointManagerOptions::new().create(&job.worker, to)?),
            None => None,
        };
        let done = match &checkpoints {
            Some(checkpoints) if options.resume => checkpoints::resume(checkpoints)?,
            _ => 0,
        };
        let front = Front { job: &job, layer, optimizer };
        let data = Dataset::load(&options.folder, "train", options.images)?;
        front.train(&data, done, checkpoints.as_ref().map(|to| (to, options.every)))?;
        if !interrupt::has_come() {
            let right = front.test(&Dataset::load(&options.folder, "t10k", TESTS)?)?;
            println!("{:.1} % of {TESTS} images that it never saw are right", 100.0 * right);
            assert!(right > 0.7, "guessing gives 0.1");
        }
    }
    let is_first = job.is_first();
    job.finish()?;
    if is_first && interrupt::has_come() {
        process::exit(130);
    }
    Ok(())
}
