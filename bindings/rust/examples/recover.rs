//! A job that saves checkpoints, goes on from the last one, and survives the loss of a process.
//!
//! `recover FOLDER [KILL_AT]`
//!
//! It learns the line y = 3 x - 1 in 100 steps: the front process has the slope, and the back
//! process the offset. At step KILL_AT the back process is killed. A second run with the same FOLDER
//! goes on from the first.
mod job;

use distgrad::{
    manual_seed, CheckpointContents, CheckpointManager, CheckpointManagerOptions, Code,
    LoadOptions, Message, Optimizer, Result, Sgd, Tensor,
};
use job::{Job, MINUTE};
use std::{
    env,
    error::Error,
    process, thread,
    time::{Duration, Instant},
};

const STEPS: i64 = 100;
const EVERY: i64 = 20;

/// One step over both processes. Returns the loss of its batch.
fn step(job: &Job, slope: &Tensor, optimizer: &Optimizer<'_>, number: i64) -> Result<f32> {
    manual_seed(number as u64)?; // a step that is taken again has the same batch
    let x = Tensor::randn(&[16])?;
    let y = x.mul_scalar(3.0)?.sub_scalar(1.0)?;
    let context = job.worker.context()?;
    let sum = context.call("back", "add", &Message::new("", [x.mul(slope)?])?)?.tensor(0)?;
    let loss = sum.mse_loss(&y)?;
    context.backward([&loss])?;
    optimizer.step(&context)?;
    loss.item()
}

// [doc: resume]
/// Loads the newest checkpoint, and returns its step. If there is none, saves what there is as that
/// of step 0: something to come back to.
fn resume(checkpoints: &CheckpointManager<'_>) -> Result<i64> {
    match checkpoints.load(&LoadOptions::new()) {
        Ok(loaded) => Ok(loaded.step),
        Err(error) if error.code() == Code::NotFound => checkpoints.save(0, None).map(|()| 0),
        Err(error) => Err(error),
    }
}
// [doc: end]

// [doc: train]
fn train(
    job: &Job,
    slope: &Tensor,
    optimizer: &Optimizer<'_>,
    folder: &str,
    mut kill_at: Option<i64>,
) -> std::result::Result<(), Box<dyn Error>> {
    let checkpoints = CheckpointManagerOptions::new().create(&job.worker, folder)?;
    let mut give_up = Instant::now() + MINUTE;
    let mut done = None; // so many steps, once a checkpoint is loaded
    while done != Some(STEPS) {
        let next = match done {
            None => resume(&checkpoints).inspect(|number| println!("going on from step {number}")),
            Some(number) if kill_at == Some(number) => {
                kill_at = None; // once
                job.worker.call("back", "die", &Message::empty()?).map(|_| number)
            }
            Some(number) => step(job, slope, optimizer, number).and_then(|loss| {
                let number = number + 1;
                if number % EVERY == 0 {
                    checkpoints.save(number, None)?;
                    println!("step {number}: loss {loss}");
                }
                Ok(number)
            }),
        };
        match next {
            Ok(number) => done = Some(number),
            // The back process is gone, or is there and has not created its part yet.
            Err(error)
                if matches!(error.code(), Code::Unavailable | Code::FailedPrecondition)
                    && (done.is_some() || Instant::now() < give_up) =>
            {
                if let Some(number) = done.take() {
                    println!("step {number} has failed: {error}");
                    give_up = Instant::now() + MINUTE;
                }
                job.restart_killed()?;
                thread::sleep(Duration::from_millis(100)); // before it tries again
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
// [doc: end]

// [doc: part]
fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().ok_or("recover FOLDER [KILL_AT]")?;
    let kill_at = arguments.next().map(|number| number.parse()).transpose()?;
    let job = Job::start(&["front", "back"])?;
    let parameter = Tensor::from_slice(&[0.0f32], &[1])?.require_grad()?;
    let optimizer = Sgd::new(0.02).momentum(0.5).create(&job.worker, "sgd", [&parameter])?;
    let offset = parameter.clone();
    job.worker.register("add", move |request| {
        Ok(Message::new("", [request.tensor(0)?.add(&offset)?])?)
    })?;
    job.worker.register("die", |_| process::abort())?;
    // Last, for whoever finds this part finds all of the above.
    let name = if job.is_first() { "slope" } else { "offset" };
    let part = CheckpointContents::new()
        .tensors([(name, &parameter)])
        .optimizer("sgd", &optimizer)
        .create(&job.worker, "")?;
    if job.is_first() {
        train(&job, &parameter, &optimizer, &folder, kill_at)?;
    }
    drop((part, optimizer));
    job.finish() // until then the back process answers
}
// [doc: end]
