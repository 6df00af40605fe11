//! A parameter server: one process holds the parameters, and three others each train on a part of the
//! data at the same time. A trainer pulls the parameters inside a context, so its backward ends at the
//! server, which then steps from that context's gradients, while the others train.
//!
//! `parameter_server [FOLDER [IMAGES]]`; FOLDER has the four `*-ubyte.gz` files.
mod fashion_mnist;
mod job;

use distgrad::{Context, Message, NoGrad, Result, Tensor, Worker};
use fashion_mnist::{accuracy, parameter, Dataset, CLASSES, FOLDER, PIXELS};
use job::{Job, MINUTE};
use std::{
    env,
    error::Error,
    sync::{Arc, Mutex},
};

const NAMES: [&str; 4] = ["server", "trainer1", "trainer2", "trainer3"];
const TRAINERS: usize = NAMES.len() - 1;
const BATCH: usize = 50;
const TESTS: usize = 1000;
const LEARNING_RATE: f64 = 0.05;

/// Registers the server's handlers.
fn serve(worker: &Worker) -> Result<()> {
    let weight = parameter(&[CLASSES as i64, PIXELS as i64], 0.01)?;
    let bias = parameter(&[CLASSES as i64], 0.01)?;
    // The mutex keeps a pull from seeing half a step.
    let model = Arc::new(Mutex::new([weight, bias]));
    let ours = Arc::clone(&model);
    worker.register("pull", move |_| {
        let model = ours.lock().map_err(|_| "an earlier call panicked")?;
        // Copies, for a step may write while the reply is on its way.
        Ok(Message::new("", [model[0].copy()?, model[1].copy()?])?)
    })?;
    worker.register("step", move |request| {
        let _model = model.lock().map_err(|_| "an earlier call panicked")?;
        let _no_grad = NoGrad::new();
        let context = request.context().ok_or("a step is called inside a context")?;
        for (parameter, gradient) in context.gradients()? {
            // SAFETY: this thread holds the mutex, and other threads have only copies.
            unsafe { parameter.add_(&gradient, -LEARNING_RATE) }?;
        }
        Ok(Message::from_payload("")?)
    })
}

/// Pulls the model, and applies it.
fn forward(context: &Context<'_>, images: &Tensor) -> Result<Tensor> {
    let model = context.call("server", "pull", &Message::from_payload("")?)?;
    images.linear(&model.tensor(0)?, Some(&model.tensor(1)?))
}

/// Trains on every third batch.
fn train(worker: &Worker, data: &Dataset) -> Result<()> {
    let mine = worker.rank() as usize - 1;
    for batch in (mine..data.len() / BATCH).step_by(TRAINERS) {
        let (images, labels) = data.batch(batch * BATCH, BATCH)?;
        let context = worker.context()?;
        context.backward([forward(&context, &images)?.cross_entropy_loss(&labels)?])?;
        context.call("server", "step", &Message::from_payload("")?)?;
    }
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| FOLDER.into());
    let count = arguments.next().map_or(Ok(60_000), |count| count.parse())?;

    let job = Job::start(&NAMES)?;
    if job.is_first() {
        serve(&job.worker)?;
    }
    job.worker.barrier(MINUTE)?; // the server can be called
    if !job.is_first() {
        train(&job.worker, &Dataset::load(&folder, "train", count)?)?;
    }
    job.worker.barrier(None)?; // all have trained
    if job.is_first() {
        let _no_grad = NoGrad::new();
        let (images, labels) = Dataset::load(&folder, "t10k", TESTS)?.batch(0, TESTS)?;
        let right = accuracy(&forward(&job.worker.context()?, &images)?, &labels)?;
        println!("{:.1} % of {TESTS} images that it never saw are right", 100.0 * right);
        assert!(right > 0.6, "guessing gives 0.1");
    }
    job.finish()
}
