//! Trains replicas of a model, one in each of three processes, each with data of its own: gradients
//! are averaged, so that the replicas stay the same. They learn the line y = 3 x - 1.
mod job;

use distgrad::{
    manual_seed, op, values, GradientAveragerOptions, ProcessGroupOptions, Result, Sgd, Tensor,
    Worker,
};
use job::{Job, MINUTE};
use std::error::Error;

fn train(worker: &Worker) -> Result<()> {
    manual_seed(worker.rank().into())?; // data of its own
    let slope = Tensor::from_slice(&[0.0f32], &[1])?.require_grad()?;
    let offset = Tensor::from_slice(&[0.0f32], &[1])?.require_grad()?;
    let parameters = [&slope, &offset];
    let optimizer = Sgd::new(0.1).create(worker, "", parameters)?;
    let group = ProcessGroupOptions::new().create(worker)?;
    let averager = GradientAveragerOptions::new().create(&group, parameters)?;
    worker.barrier(MINUTE)?; // all have an optimizer

    let mut loss = f32::MAX;
    for _ in 0..200 {
        let x = op("aten::randn", &values![[16]])?;
        let y = x.mul_scalar(3.0)?.sub_scalar(1.0)?;
        let error = x.mul(&slope)?.add(&offset)?.mse_loss(&y)?;
        let context = worker.context()?;
        averager.average_in_backward(&context)?;
        context.backward([&error])?;
        averager.average(&context)?;
        optimizer.step(&context)?;
        loss = error.item()?;
    }
    let [slope, offset] = [slope.item::<f32>()?, offset.item::<f32>()?];
    println!("replica {}: y = {slope} x + {offset}", worker.rank());
    assert!(loss < 1e-3, "it has not learned: {loss}");
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let job = Job::start(&["one", "two", "three"])?;
    train(&job.worker)?;
    job.finish()
}
