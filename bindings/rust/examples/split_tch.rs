//! The same as `split`, with a model written with tch: its modules, operators and variables. Only the
//! tensors that cross between the processes are distgrad's: the same memory, with its history.
//!
//! `split_tch [FOLDER [IMAGES]]`; FOLDER has the four `*-ubyte.gz` files.
mod fashion_mnist;
mod job;

use distgrad::{Adam, Context, Message, NoGrad, Result, Tensor};
use fashion_mnist::{accuracy, Dataset, CLASSES, FOLDER, PIXELS};
use indicatif::ProgressIterator;
use job::{Job, MINUTE};
use std::{env, error::Error, sync::Mutex};
use tch::{nn, nn::Module, Device};

const HIDDEN: i64 = 64;
const BATCH: usize = 50;
const TESTS: usize = 1000;

fn forward(front: &impl Module, context: &Context<'_>, images: &Tensor) -> Result<tch::Tensor> {
    let hidden = front.forward(&images.into());
    let reply =
        context.call("back", "classify", &Message::new("", [Tensor::try_from(&hidden)?])?)?;
    Ok((&reply.tensor(0)?).into())
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| FOLDER.into());
    let count = arguments.next().map_or(Ok(60_000), |count| count.parse())?;

    let job = Job::start(&["front", "back"])?;
    tch::manual_seed(1);
    let variables = nn::VarStore::new(Device::Cpu);
    let root = variables.root();
    let model = match job.is_first() {
        true => nn::seq()
            .add(nn::linear(&root / "first", PIXELS as i64, HIDDEN, Default::default()))
            .add_fn(|x| x.relu()),
        false => {
            nn::seq().add(nn::linear(&root / "second", HIDDEN, CLASSES as i64, Default::default()))
        }
    };
    let parameters: Vec<Tensor> =
        variables.trainable_variables().iter().map(Tensor::try_from).collect::<Result<_>>()?;
    let optimizer = Adam::new(2e-3).create(&job.worker, "", &parameters)?;

    if job.is_first() {
        job.worker.barrier(MINUTE)?; // both are ready
        let data = Dataset::load(&folder, "train", count)?;
        for batch in (0..data.len() / BATCH).progress() {
            let (images, labels) = data.batch(batch * BATCH, BATCH)?;
            let context = job.worker.context()?;
            let loss =
                forward(&model, &context, &images)?.cross_entropy_for_logits(&(&labels).into());
            context.backward([Tensor::try_from(&loss)?])?;
            optimizer.step(&context)?;
        }

        let _no_grad = NoGrad::new();
        let (images, labels) = Dataset::load(&folder, "t10k", TESTS)?.batch(0, TESTS)?;
        let scores = forward(&model, &job.worker.context()?, &images)?;
        let right = accuracy(&Tensor::try_from(&scores)?, &labels)?;
        println!("{:.1} % of {TESTS} images that it never saw are right", 100.0 * right);
        assert!(right > 0.7, "guessing gives 0.1");
    } else {
        let model = Mutex::new(model); // a tch module is for one thread at a time
        job.worker.register("classify", move |request| {
            let hidden = (&request.tensor(0)?).into();
            let scores = model.lock().map_err(|_| "an earlier call panicked")?.forward(&hidden);
            Ok(Message::new("", [Tensor::try_from(&scores)?])?)
        })?;
        job.worker.barrier(MINUTE)?;
    }
    job.finish()
}
