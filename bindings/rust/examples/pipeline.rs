//! Trains a model whose two layers are in two processes, as a pipeline: each batch is cut into
//! micro-batches, and while one process computes one of them, the other computes another.
mod job;

use distgrad::{
    Adam, Optimizer, Pipeline, PipelineStage, PipelineStages, Result, Schedule, Tensor, Worker,
};
use job::{Job, MINUTE};
use std::error::Error;

const WIDTH: i64 = 16;
const BATCH: i64 = 64;

/// Lets the pipeline "model" use this process's stage: the front one has stage 0, the back one 1.
fn add_stage<'w>(worker: &'w Worker, weight: &Tensor) -> Result<PipelineStages<'w>> {
    let weight = weight.clone();
    let stage = PipelineStage::new(worker.rank().into(), move |batch| {
        Ok([batch.input(0)?.matmul(&weight)?.tanh()?])
    });
    // Of the last stage.
    let stage = stage.loss(|batch| Ok(batch.output(0)?.mse_loss(batch.target(0)?)?));
    PipelineStages::new(worker, "model", [stage])
}

/// Returns the first loss and the last one.
fn train(worker: &Worker, optimizer: &Optimizer<'_>) -> Result<(f32, f32)> {
    let schedule = Schedule::one_forward_one_backward(2, 4)?; // stages, micro-batches
    let pipeline = Pipeline::new(worker, "model", &schedule, &["front", "back"])?;
    let (x, y) = (Tensor::randn(&[BATCH, WIDTH])?, Tensor::randn(&[BATCH, WIDTH])?);
    let mut losses = Vec::new();
    for _ in 0..300 {
        let context = worker.context()?;
        let result = pipeline.train(&context, &[&x], &[&y])?;
        optimizer.step(&context)?; // on both processes
        losses.push(result.loss.expect("a loss").item()?);
    }
    Ok((losses[0], losses[losses.len() - 1]))
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let job = Job::start(&["front", "back"])?;
    let worker = &job.worker;
    distgrad::manual_seed(u64::from(worker.rank()))?;
    let weight = Tensor::randn(&[WIDTH, WIDTH])?.require_grad()?;
    let optimizer = Adam::new(0.01).create(worker, "", [&weight])?;
    let stages = add_stage(worker, &weight)?;
    worker.barrier(MINUTE)?; // both have their stages
    if job.is_first() {
        let (first, last) = train(worker, &optimizer)?;
        println!("the loss was {first:.4}, and is {last:.4}");
        assert!(last < 0.8 * first);
    }
    worker.barrier(None)?; // until then the back process answers
    drop((stages, optimizer));
    job.finish()
}
