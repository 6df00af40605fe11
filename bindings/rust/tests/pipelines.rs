//! Pipelines: steps against one process, to the last bit; what goes wrong; and ends in every order.
mod common;
use common::{Folder, LONG};
use distgrad::{
    Action, ActionKind, Adam, BackwardOptions, Code, Context, Error, MicroBatch, Optimizer,
    OriginKind, Pipeline, PipelineOptions, PipelineRunOptions, PipelineStage, PipelineStages,
    PipelineStagesOptions, PipelineStep, Reduction, Schedule, ScheduleData, Sgd, Tensor, Worker,
};
use std::{
    collections::VecDeque,
    panic::{catch_unwind, AssertUnwindSafe},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc, Arc, Mutex,
    },
    thread,
    time::Duration,
};

const WIDTH: i64 = 16;
const BATCH: i64 = 10;

/// Runs `test` with a job of two workers, "front" and "back", which end in any order.
fn pair(test: impl FnOnce(&Worker, &Worker)) {
    let folder = Folder::new();
    let create = |name, rank| folder.options().name(name).rank(rank, 2).create().expect("a worker");
    let (front, back) = thread::scope(|scope| {
        let back = scope.spawn(|| create("back", 1));
        (create("front", 0), back.join().unwrap())
    });
    test(&front, &back);
}

/// The same numbers for the same seed. A row has 64 bytes: the last bits of a product depend on how
/// its operands are aligned, and parts of a batch are then as aligned as what was sent.
fn numbers(mut seed: u64, shape: &[i64]) -> Tensor {
    let count = shape.iter().product::<i64>();
    let next = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let data: Vec<f32> = std::iter::repeat_with(next).take(count as usize).collect();
    Tensor::from_slice(&data, shape).unwrap()
}

fn batch(step: u64) -> (Tensor, Tensor) {
    (numbers(100 + step, &[BATCH, WIDTH]), numbers(200 + step, &[BATCH, WIDTH]))
}

#[derive(Clone)]
struct Layer {
    weight: Tensor,
    bias: Tensor,
}

impl Layer {
    fn new(index: u64) -> Self {
        Self {
            weight: numbers(10 + index, &[WIDTH, WIDTH]).require_grad().unwrap(),
            bias: numbers(20 + index, &[WIDTH]).require_grad().unwrap(),
        }
    }
    fn all(count: u64) -> Vec<Self> {
        (0..count).map(Self::new).collect()
    }
    fn forward(&self, x: &Tensor) -> distgrad::Result<Tensor> {
        x.matmul(&self.weight)?.add(&self.bias)?.tanh()
    }
    fn parameters(&self) -> [&Tensor; 2] {
        [&self.weight, &self.bias]
    }
    /// The stage of that number.
    fn stage(&self, number: u64) -> PipelineStage {
        let layer = self.clone();
        PipelineStage::new(number, move |batch| {
            assert_eq!(batch.stage(), number);
            Ok([layer.forward(batch.input(0)?)?])
        })
        .loss(loss)
    }
}

fn loss(batch: &MicroBatch) -> Result<Tensor, Box<dyn std::error::Error + Send + Sync>> {
    Ok(batch.output(0)?.mse_loss(batch.target(0)?)?)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Stage s is on worker s % 2.
fn stages_of<'w>(worker: &'w Worker, rank: usize, layers: &[Layer]) -> PipelineStages<'w> {
    let own = layers.iter().enumerate().skip(rank).step_by(2);
    let stages = own.map(|(s, layer)| layer.stage(s as u64));
    PipelineStagesOptions::new().num_threads(1).create(worker, "model", stages).unwrap()
}

fn sgd<'w>(worker: &'w Worker, name: &str, parameters: Vec<&Tensor>) -> Optimizer<'w> {
    Sgd::new(0.05).momentum(0.9).create(worker, name, parameters).unwrap()
}

/// The same micro-batches, one after the other, in one context.
fn step_alone(
    layers: &[Layer],
    count: i64,
    reduction: Reduction,
    context: &Context<'_>,
    (x, y): (&Tensor, &Tensor),
) -> Vec<Tensor> {
    let mut begin = 0;
    let mut losses = Vec::new();
    for m in 0..count {
        let size = BATCH / count + i64::from(m < BATCH % count);
        let part = |of: &Tensor| of.narrow(0, begin, size).unwrap();
        let forward = |x: Tensor, layer: &Layer| layer.forward(&x).unwrap();
        let loss = layers.iter().fold(part(x), forward).mse_loss(&part(y)).unwrap();
        let weight = match reduction {
            Reduction::Mean => (size as f64 / BATCH as f64) as f32,
            Reduction::Sum => 1.0,
        };
        let weight = Tensor::from_scalar(weight).unwrap();
        let options = BackwardOptions::new().retain_graph(true).root_gradients(&[Some(&weight)]);
        context.backward_with([&loss], &options).unwrap();
        losses.push(loss);
        begin += size;
    }
    losses
}

#[test]
fn steps_are_those_of_one_process_to_the_last_bit() {
    let cases = [
        (Schedule::gpipe(2, 4), Reduction::Mean),
        (Schedule::one_forward_one_backward(2, 4), Reduction::Sum),
        (Schedule::interleaved_one_forward_one_backward(2, 2, 4), Reduction::Mean),
        (Schedule::interleaved_one_forward_one_backward(2, 2, 3), Reduction::Mean),
        (Schedule::zero_bubble_h1(2, 4), Reduction::Mean),
        (Schedule::zero_bubble_h2(2, 4), Reduction::Sum),
        (Schedule::zero_bubble(2, 4, 3), Reduction::Mean),
    ];
    for (schedule, reduction) in cases {
        let schedule = schedule.unwrap();
        let data = schedule.data().unwrap();
        let count = data.rank_of_stage.len() as u64;
        let (layers, alone) = (Layer::all(count), Layer::all(count));
        pair(|front, back| {
            let _stages = [stages_of(front, 0, &layers), stages_of(back, 1, &layers)];
            let parameters = |layers: &'_ [Layer], skip: usize, step: usize| -> Vec<Tensor> {
                let own = layers.iter().skip(skip).step_by(step);
                own.flat_map(Layer::parameters).cloned().collect()
            };
            let all = parameters(&alone, 0, 1);
            let own = [parameters(&layers, 0, 2), parameters(&layers, 1, 2)];
            let optimizer_alone = sgd(front, "alone", all.iter().collect());
            let _none = sgd(back, "alone", vec![]);
            let optimizer = sgd(front, "pipeline", own[0].iter().collect());
            let _other = sgd(back, "pipeline", own[1].iter().collect());
            let pipeline = PipelineOptions::new()
                .reduction(reduction)
                .create(front, "model", &schedule, &["front", "back"])
                .unwrap();
            for step in 0..10 {
                let (x, y) = batch(step);
                let context = front.context().unwrap();
                let result = pipeline.train(&context, &[&x], &[&y]).unwrap();
                let context_alone = front.context().unwrap();
                let micro_batches = data.micro_batches as i64;
                let losses = step_alone(&alone, micro_batches, reduction, &context_alone, (&x, &y));
                let of_all = |losses: &[Tensor]| losses.iter().flat_map(bits).collect::<Vec<_>>();
                assert_eq!(of_all(&result.losses), of_all(&losses), "{schedule:?}, step {step}");
                assert!(result.loss.is_some() && result.outputs.is_empty());
                optimizer.step(&context).unwrap();
                optimizer_alone.step(&context_alone).unwrap();
            }
            for (ours, theirs) in layers.iter().zip(&alone) {
                assert_eq!(bits(&ours.weight), bits(&theirs.weight), "{schedule:?}");
                assert_eq!(bits(&ours.bias), bits(&theirs.bias), "{schedule:?}");
            }
        });
    }
}

fn two<'w>(front: &'w Worker) -> Pipeline<'w> {
    let schedule = Schedule::one_forward_one_backward(2, 4).unwrap();
    Pipeline::new(front, "model", &schedule, &["front", "back"]).unwrap()
}

fn try_step(front: &Worker, pipeline: &Pipeline<'_>) -> Result<(), Error> {
    let (x, y) = batch(0);
    let context = front.context().unwrap();
    pipeline.train(&context, &[&x], &[&y]).map(drop)
}

#[test]
fn an_evaluation_gives_outputs_and_losses() {
    fn may_cross_threads<T: Send + Sync>(_: &T) {}
    let layers = Layer::all(2);
    pair(|front, back| {
        let stages = [stages_of(front, 0, &layers), stages_of(back, 1, &layers)];
        let pipeline = two(front);
        may_cross_threads(&stages);
        may_cross_threads(&pipeline);
        let (x, y) = batch(0);
        for targets in [&[][..], &[&y][..]] {
            let result = pipeline.evaluate(&[&x], targets).unwrap();
            assert_eq!(result.outputs.len(), 4);
            let mut begin = 0;
            for outputs in &result.outputs {
                let [Some(out)] = &outputs[..] else { panic!("{outputs:?}") };
                let part = x.narrow(0, begin, out.shape()[0]).unwrap();
                let expected = layers[1].forward(&layers[0].forward(&part).unwrap()).unwrap();
                assert_eq!(bits(out), bits(&expected));
                assert!(!out.requires_grad());
                begin += out.shape()[0];
            }
            assert_eq!(begin, BATCH);
            assert_eq!(result.losses.len(), 4 * targets.len());
            assert_eq!(result.loss.is_some(), !targets.is_empty());
        }
        let error = pipeline.evaluate(&[], &[]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    });
}

#[test]
fn several_tensors_and_gaps() {
    pair(|front, back| {
        let _front = PipelineStages::new(
            front,
            "model",
            [PipelineStage::new(0, |batch| {
                let (a, b) = (batch.input(0)?, batch.input(1)?);
                Ok([Some(a.add(b)?), None, Some(b.clone())])
            })
            .inputs(Some(2))],
        )
        .unwrap();
        let _back = PipelineStages::new(
            back,
            "model",
            [PipelineStage::new(1, |batch| {
                assert!(batch.inputs()[1].is_none() && batch.inputs().len() == 3);
                assert_eq!(batch.input(1).unwrap_err().code(), Code::OutOfRange);
                assert_eq!(batch.input(3).unwrap_err().code(), Code::OutOfRange);
                assert!(batch.outputs().is_empty() && batch.targets().is_empty());
                Ok([batch.input(0)?.mul(batch.input(2)?)?])
            })
            .inputs(None)],
        )
        .unwrap();
        let (x, y) = batch(0);
        let result = two(front).evaluate(&[&x, &y], &[]).unwrap();
        let outputs = result.outputs.iter().flatten().flatten();
        let expected = x.add(&y).unwrap().mul(&y).unwrap();
        assert_eq!(outputs.flat_map(bits).collect::<Vec<_>>(), bits(&expected));
        let error = two(front).evaluate(&[&x], &[]).unwrap_err();
        assert!(error.message().contains("forward takes 2 inputs, and is given 1"), "{error}");
    });
}

#[test]
fn an_error_names_stage_micro_batch_and_worker() {
    #[derive(Clone, Copy, PartialEq)]
    enum Fault {
        None,
        Fails,
        Panics,
        LossFails,
    }
    let layers = Layer::all(2);
    let fault = Arc::new(Mutex::new((Fault::None, 0)));
    pair(|front, back| {
        let _front = stages_of(front, 0, &layers);
        let (layer, ours) = (layers[1].clone(), Arc::clone(&fault));
        let of_loss = Arc::clone(&fault);
        let stage = PipelineStage::new(1, move |batch| {
            let out = layer.forward(batch.input(0)?)?;
            let mut fault = ours.lock().unwrap();
            fault.1 += 1;
            match *fault {
                (Fault::Fails, 3) => Err(Error::new(Code::DataLoss, "the dog ate it"))?,
                (Fault::Panics, 2) => {
                    drop(fault);
                    panic!("in the second");
                }
                _ => (),
            }
            Ok([out])
        });
        let stage = stage.loss(move |batch| match of_loss.lock().unwrap().0 {
            Fault::LossFails => Err("it is lost".into()),
            _ => loss(batch),
        });
        let _back = PipelineStages::new(back, "model", [stage]).unwrap();
        let pipeline = two(front);
        for (with, code, text) in [
            (Fault::Fails, Code::DataLoss, "micro-batch 2 on worker 'back': the dog ate it"),
            (
                Fault::Panics,
                Code::Internal,
                "micro-batch 1 on worker 'back': the forward panicked: in the second",
            ),
            (Fault::LossFails, Code::Unknown, "micro-batch 0 on worker 'back': it is lost"),
        ] {
            try_step(front, &pipeline).unwrap();
            *fault.lock().unwrap() = (with, 0);
            let error = try_step(front, &pipeline).unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            assert!(error.message().contains("forward of stage 1, "), "{error}");
            assert!(error.message().contains(text), "{error}");
            let origin = error.origin().unwrap();
            assert_eq!((origin.rank, origin.kind), (1, OriginKind::Handler), "{error}");
            *fault.lock().unwrap() = (Fault::None, 0);
        }
        try_step(front, &pipeline).unwrap();
    });
}

/// A stage that says that it was called, and waits, once.
fn held(layer: &Layer) -> (PipelineStage, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (entered, was_entered) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let layer = layer.clone();
    let mut once = true;
    let stage = PipelineStage::new(1, move |batch| {
        if std::mem::take(&mut once) {
            entered.send(())?;
            released.recv()?;
        }
        Ok([layer.forward(batch.input(0)?)?])
    });
    (stage.loss(loss), was_entered, release)
}

#[test]
fn a_deadline_says_what_each_rank_does() {
    let layers = Layer::all(2);
    pair(|front, back| {
        let _front = stages_of(front, 0, &layers);
        let (stage, _entered, release) = held(&layers[1]);
        let _back = PipelineStages::new(back, "model", [stage]).unwrap();
        let pipeline = two(front);
        let (x, y) = batch(0);
        let context = front.context().unwrap();
        let options = PipelineRunOptions::new().timeout(Duration::from_secs(3));
        let error = pipeline.train_with(&context, &[&x], &[&y], &options).unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
        let text = "worker 'back' is in the forward of stage 1, micro-batch 0";
        assert!(error.message().contains(text), "{error}");
        release.send(()).unwrap();
        try_step(front, &pipeline).unwrap();
    });
}

#[test]
fn a_worker_that_is_lost_is_named() {
    let layers = Layer::all(2);
    pair(|front, back| {
        let _front = stages_of(front, 0, &layers);
        let (stage, entered, release) = held(&layers[1]);
        let _back = PipelineStages::new(back, "model", [stage]).unwrap();
        let pipeline = two(front);
        thread::scope(|scope| {
            let closer = scope.spawn(move || {
                entered.recv().unwrap();
                let error = back.close(Duration::from_millis(1)).unwrap_err();
                assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
                release.send(()).unwrap();
                back.close(LONG)
            });
            let error = try_step(front, &pipeline).unwrap_err();
            assert!([Code::Cancelled, Code::Unavailable].contains(&error.code()), "{error}");
            assert!(error.message().contains("back"), "{error}");
            closer.join().unwrap().unwrap();
        });
        let error = try_step(front, &pipeline).unwrap_err();
        assert!(error.message().contains("back"), "{error}");
    });
}

#[test]
fn dropping_in_any_order() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let counted = |stage: u64, layer: &Layer| {
        let (counted, layer) = (Counted(Arc::clone(&dropped)), layer.clone());
        PipelineStage::new(stage, move |batch| {
            let _kept = &counted;
            Ok([layer.forward(batch.input(0)?)?])
        })
        .loss(loss)
    };
    let layers = Layer::all(2);
    pair(|front, back| {
        let front_stages = PipelineStages::new(front, "model", [counted(0, &layers[0])]).unwrap();
        let back_stages = PipelineStages::new(back, "model", [counted(1, &layers[1])]).unwrap();
        let pipeline = two(front);
        try_step(front, &pipeline).unwrap();
        // The stages before the pipeline; others take their place.
        assert_eq!(dropped.load(Ordering::SeqCst), 0);
        drop(back_stages);
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
        let error = try_step(front, &pipeline).unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        let (stage, entered, release) = held(&layers[1]);
        let back_stages = PipelineStages::new(back, "model", [stage]).unwrap();
        // While a function runs: it is waited for.
        thread::scope(|scope| {
            let step = scope.spawn(|| try_step(front, &pipeline));
            entered.recv().unwrap();
            let releaser = scope.spawn(move || {
                // The step ends when the stages are taken off, and they then wait.
                let error = step.join().unwrap().unwrap_err();
                assert!([Code::Cancelled, Code::NotFound].contains(&error.code()), "{error}");
                release.send(()).unwrap();
            });
            drop(back_stages);
            releaser.join().unwrap();
        });
        // The pipeline and a context before its result, and the stages after all of them.
        let back_stages = PipelineStages::new(back, "model", [counted(1, &layers[1])]).unwrap();
        let (x, y) = batch(0);
        let context = front.context().unwrap();
        let result = pipeline.train(&context, &[&x], &[&y]).unwrap();
        drop(pipeline);
        drop(context);
        assert_eq!(result.losses.len(), 4);
        drop(front_stages);
        drop(result);
        drop(back_stages);
        assert_eq!(dropped.load(Ordering::SeqCst), 3);
        // Taken, though it failed.
        let refused = [counted(0, &layers[0]), counted(0, &layers[0])];
        let error = PipelineStages::new(front, "model", refused).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert_eq!(dropped.load(Ordering::SeqCst), 5);
        // With their worker.
        let last = PipelineStages::new(back, "model", [counted(1, &layers[1])]).unwrap();
        back.close(LONG).unwrap();
        assert_eq!(dropped.load(Ordering::SeqCst), 6);
        drop(last);
    });
}

/// A step that was started, with its context.
fn start<'w>(
    worker: &'w Worker,
    pipeline: &Pipeline<'w>,
    number: u64,
) -> Result<(Context<'w>, PipelineStep<'w>), Error> {
    let (x, y) = batch(number);
    let context = worker.context().unwrap();
    let step = pipeline.start(&context, &[&x], &[&y])?;
    Ok((context, step))
}

#[test]
fn steps_in_flight_are_those_of_train_to_the_last_bit() {
    fn may_cross_threads<T: Send + Sync>(_: &T) {}
    let layers = Layer::all(2);
    pair(|front, back| {
        let _stages = [stages_of(front, 0, &layers), stages_of(back, 1, &layers)];
        let pipeline = two(front);
        let started: Vec<_> = (0..8).map(|n| start(front, &pipeline, n).unwrap()).collect();
        may_cross_threads(&started);
        let error = start(front, &pipeline, 8).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert!(error.message().contains("8 steps of pipeline 'model' were started"), "{error}");
        let error = try_step(front, &pipeline).unwrap_err();
        assert!(error.message().contains("runs already"), "{error}");
        let wait = |(context, step): (_, PipelineStep<'_>)| (context, step.wait().unwrap());
        let results: Vec<(Context<'_>, _)> = started.into_iter().map(wait).collect();
        for (number, (context, result)) in (0..).zip(results) {
            let (x, y) = batch(number);
            let of_train = front.context().unwrap();
            let expected = pipeline.train(&of_train, &[&x], &[&y]).unwrap();
            let of_all = |losses: &[Tensor]| losses.iter().flat_map(bits).collect::<Vec<_>>();
            assert_eq!(of_all(&result.losses), of_all(&expected.losses), "step {number}");
            for parameter in layers[0].parameters() {
                let [ours, theirs] = [&context, &of_train].map(|c| c.gradient(parameter).unwrap());
                assert_eq!(bits(&ours), bits(&theirs), "step {number}");
            }
        }
    });
}

/// Each stage has an optimizer of its own, which steps in the schedule.
#[test]
fn local_optimizers_step_as_one_of_all_workers_does() {
    let (layers, others) = (Layer::all(2), Layer::all(2));
    let adam = Adam::adamw(0.01).weight_decay(0.1);
    let rate = |step: u64| 0.01 / (step + 1) as f64;
    let schedule = Schedule::zero_bubble_h2(2, 4).unwrap();
    pair(|front, back| {
        let stage = |number: usize| {
            let (optimizer, mut taken) = (adam.create_local(layers[number].parameters()), 0);
            let optimizer = optimizer.unwrap();
            let stage = layers[number].stage(number as u64).step(move |context| {
                optimizer.set_learning_rate(rate(taken))?;
                taken += 1;
                Ok(optimizer.step(context)?)
            });
            let worker = [front, back][number];
            PipelineStagesOptions::new().num_threads(1).create(worker, "model", [stage]).unwrap()
        };
        let stages = [stage(0), stage(1)];
        let workers = ["front", "back"];
        let pipeline =
            Pipeline::new(front, "model", &schedule.with_steps().unwrap(), &workers).unwrap();
        let mut in_flight = VecDeque::new();
        let mut ours = Vec::new();
        for number in 0..12 {
            in_flight.push_back(start(front, &pipeline, number).unwrap());
            if in_flight.len() == 3 || number == 11 {
                let wait = |(_context, step): (_, PipelineStep<'_>)| step.wait().unwrap().losses;
                ours.extend(in_flight.drain(..).flat_map(wait));
            }
        }
        drop((in_flight, pipeline, stages));

        let create = |worker, layer: &Layer| adam.create(worker, "", layer.parameters()).unwrap();
        let (optimizer, _part) = (create(front, &others[0]), create(back, &others[1]));
        let _stages = [stages_of(front, 0, &others), stages_of(back, 1, &others)];
        let pipeline = Pipeline::new(front, "model", &schedule, &workers).unwrap();
        let mut theirs = Vec::new();
        for number in 0..12 {
            let ((x, y), context) = (batch(number), front.context().unwrap());
            theirs.extend(pipeline.train(&context, &[&x], &[&y]).unwrap().losses);
            optimizer.set_learning_rate(rate(number)).unwrap();
            optimizer.step(&context).unwrap();
        }
        let of_all = |losses: &[Tensor]| losses.iter().flat_map(bits).collect::<Vec<_>>();
        assert_eq!(of_all(&ours), of_all(&theirs));
        for (layer, other) in layers.iter().zip(&others) {
            assert_eq!(bits(&layer.weight), bits(&other.weight));
        }
    });
}

/// Each rank waits in one step for what the other does in the other step: one step after the other
/// would not come to its end.
#[test]
fn a_rank_begins_the_next_step_while_another_is_in_the_one_before() {
    let layers = Layer::all(2);
    let schedule = Schedule::gpipe(2, 1).unwrap().with_steps().unwrap();
    let (begun, has_begun) = mpsc::channel();
    pair(|front, back| {
        let (layer, mut forwards) = (layers[0].clone(), 0);
        let first = PipelineStage::new(0, move |batch| {
            forwards += 1;
            if forwards == 2 {
                begun.send(())?;
            }
            Ok([layer.forward(batch.input(0)?)?])
        });
        let mut steps = 0;
        let last = layers[1].stage(1).step(move |_| {
            steps += 1;
            if steps == 1 {
                has_begun.recv()?;
            }
            Ok(())
        });
        let _front = PipelineStages::new(front, "model", [first.step(|_| Ok(()))]).unwrap();
        let _back = PipelineStages::new(back, "model", [last]).unwrap();
        let pipeline = Pipeline::new(front, "model", &schedule, &["front", "back"]).unwrap();
        let (_first, first) = start(front, &pipeline, 0).unwrap();
        let (_second, second) = start(front, &pipeline, 1).unwrap();
        first.wait().unwrap();
        second.wait().unwrap();
    });
}

#[test]
fn steps_in_flight_end_in_any_order() {
    let layers = Layer::all(2);
    pair(|front, back| {
        let _front = stages_of(front, 0, &layers);
        let hold = || {
            let (stage, entered, release) = held(&layers[1]);
            (PipelineStages::new(back, "model", [stage]).unwrap(), entered, release)
        };
        // The pipeline before its step, which goes on.
        let (back_stages, entered, release) = hold();
        let pipeline = two(front);
        let (_context, step) = start(front, &pipeline, 0).unwrap();
        entered.recv().unwrap();
        drop(pipeline);
        release.send(()).unwrap();
        assert_eq!(step.wait().unwrap().losses.len(), 4);
        drop(back_stages);

        // A step that nobody waits for ends those behind it.
        let (back_stages, entered, release) = hold();
        let pipeline = two(front);
        let mut started: Vec<_> = (0..4).map(|n| start(front, &pipeline, n).unwrap()).collect();
        entered.recv().unwrap();
        let (context, step) = started.remove(1);
        drop(step);
        drop(context);
        for (_context, step) in started.drain(1..) {
            step.wait().unwrap_err();
        }
        release.send(()).unwrap();
        started.pop().unwrap().1.wait().unwrap();
        try_step(front, &pipeline).unwrap();
        drop(back_stages);

        // The context before its step, whose gradients are gone.
        let (back_stages, entered, release) = hold();
        let (context, step) = start(front, &pipeline, 0).unwrap();
        entered.recv().unwrap();
        drop(context);
        release.send(()).unwrap();
        drop(step.wait());
        try_step(front, &pipeline).unwrap();
        drop(back_stages);

        // The worker ends those that are left.
        let (back_stages, entered, release) = hold();
        let (_first, first) = start(front, &pipeline, 0).unwrap();
        let (_second, second) = start(front, &pipeline, 1).unwrap();
        entered.recv().unwrap();
        front.close(LONG).unwrap();
        let error = first.wait().unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        drop(second);
        release.send(()).unwrap();
        drop(back_stages);
    });
}

#[test]
fn the_step_of_the_schedule_and_recomputation() {
    let (layers, alone) = (Layer::all(2), Layer::all(2));
    let schedule = Schedule::zero_bubble_h1(2, 3).unwrap().with_steps().unwrap();
    let forwards = Arc::new(AtomicUsize::new(0));
    pair(|front, back| {
        let stage = |number: u64, layer: &Layer| {
            let (layer, forwards) = (layer.clone(), Arc::clone(&forwards));
            let own = layer.clone();
            let stage = PipelineStage::new(number, move |batch| {
                forwards.fetch_add(1, Ordering::SeqCst);
                Ok([layer.forward(batch.input(0)?)?])
            });
            stage.loss(loss).recompute(true).step(move |context| {
                for parameter in own.parameters() {
                    let gradient = context.gradient(parameter)?;
                    context.set_gradient(parameter, &gradient.neg()?)?;
                }
                Ok(())
            })
        };
        let _front = PipelineStages::new(front, "model", [stage(0, &layers[0])]).unwrap();
        let _back = PipelineStages::new(back, "model", [stage(1, &layers[1])]).unwrap();
        let pipeline = Pipeline::new(front, "model", &schedule, &["front", "back"]).unwrap();
        let (x, y) = batch(0);
        let context = front.context().unwrap();
        pipeline.train(&context, &[&x], &[&y]).unwrap();
        assert_eq!(forwards.load(Ordering::SeqCst), 2 * 2 * 3);
        let context_alone = front.context().unwrap();
        step_alone(&alone, 3, Reduction::Mean, &context_alone, (&x, &y));
        let ours = context.gradient(&layers[0].weight).unwrap();
        let theirs = context_alone.gradient(&alone[0].weight).unwrap();
        assert_eq!(bits(&ours), bits(&theirs.neg().unwrap()));
        drop(context);

        // Of a stage that has none: nothing has run by then.
        drop(_back);
        let _back = stages_of(back, 1, &layers);
        let context = front.context().unwrap();
        let error = pipeline.train(&context, &[&x], &[&y]).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        let what = "step of stage 1, and that stage on worker 'back' has no function for it";
        assert!(error.message().contains(what), "{error}");
        assert_eq!(forwards.load(Ordering::SeqCst), 2 * 2 * 3);
    });
}

#[test]
fn what_ranks_do_is_told_and_traced() {
    let layers = Layer::all(2);
    let schedule = Schedule::gpipe(2, 2).unwrap();
    let data = schedule.data().unwrap();
    pair(|front, back| {
        let spans = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&spans);
        let own = layers[0].stage(0).on_action(move |span| {
            told.lock().unwrap().push(span);
            Ok(())
        });
        let first = PipelineStages::new(front, "model", [own]).unwrap();
        let _back = stages_of(back, 1, &layers);
        let pipeline = Pipeline::new(front, "model", &schedule, &["front", "back"]).unwrap();
        back.start_trace(None).unwrap();
        try_step(front, &pipeline).unwrap();
        let trace = back.stop_trace().unwrap();
        assert_eq!(trace.matches("\"name\":\"backward 1\"").count(), 1, "{trace}");
        assert!(trace.contains("pipeline, rank 1"), "{trace}");
        let spans = std::mem::take(&mut *spans.lock().unwrap());
        let actions: Vec<_> = spans.iter().map(|span| span.action).collect();
        assert_eq!(actions, data.lists[0]);
        for pair in spans.windows(2) {
            assert!(pair[0].begin <= pair[0].end && pair[0].end <= pair[1].begin, "{spans:?}");
            assert_eq!((pair[0].rank, pair[0].step), (0, pair[1].step));
        }
        // An error, and a panic, are the step's.
        drop(first);
        for panics in [false, true] {
            let own = layers[0].stage(0).on_action(move |_| {
                assert!(!panics, "nobody listens");
                Err(Error::new(Code::DataLoss, "the disk is full").into())
            });
            let _front = PipelineStages::new(front, "model", [own]).unwrap();
            let error = try_step(front, &pipeline).unwrap_err();
            let (code, text) = match panics {
                true => (Code::Internal, "nobody listens"),
                false => (Code::DataLoss, "the disk is full"),
            };
            assert_eq!(error.code(), code, "{error}");
            assert!(error.message().contains(text), "{error}");
        }
    });
}

#[test]
fn schedules() {
    let forward = |stage| Action { kind: ActionKind::Forward, stage, micro_batch: 0 };
    let backward = |stage| Action { kind: ActionKind::Backward, stage, micro_batch: 0 };
    let mut data = ScheduleData {
        micro_batches: 1,
        rank_of_stage: vec![0, 1],
        lists: vec![vec![forward(0), backward(0)], vec![forward(1), backward(1)]],
        max_activations: vec![1, 1],
    };
    let error = Schedule::new(&data).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    assert!(error.message().contains("is missing"), "{error}");
    let schedule = Schedule::with_transfers(&data).unwrap();
    assert_eq!(format!("{schedule:?}"), "Schedule(2 stages on 2 ranks, 1 micro-batches)");
    let whole = schedule.data().unwrap();
    assert_eq!((whole.lists[0].len(), whole.lists[1].len()), (4, 4));
    assert_eq!(Schedule::new(&whole).unwrap().data().unwrap(), whole);

    let mut asked = 0;
    let timeline = schedule
        .simulate(|_| {
            asked += 1;
            1.0
        })
        .unwrap();
    assert_eq!((asked, timeline.end), (8, 8.0));
    assert_eq!((timeline.busy, timeline.max_activations), (vec![4.0, 4.0], vec![1, 1]));
    assert_eq!(timeline.starts, [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 4.0, 5.0]]);
    let panics = || schedule.simulate(|_| panic!("no time")).map(drop);
    let payload = catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"no time"));

    data.lists[1].reverse();
    let error = Schedule::with_transfers(&data).unwrap_err();
    assert!(error.message().contains("waits for ever"), "{error}");
    data.max_activations.pop();
    assert_eq!(Schedule::new(&data).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Schedule::gpipe(0, 1).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Schedule::zero_bubble_h1(1 << 20, 2).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Schedule::zero_bubble_h2(0, 2).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Schedule::zero_bubble(2, 2, 0).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn what_is_asked_for_wrongly_is_named() {
    let layers = Layer::all(2);
    pair(|front, back| {
        let _front = stages_of(front, 0, &layers);
        let error = PipelineStages::new(front, "model", []).unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists, "{error}");
        let error = PipelineStages::new(front, "a::b", []).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        let _none = PipelineStages::new(back, "model", []).unwrap();
        let schedule = Schedule::gpipe(2, 2).unwrap();
        let error = Pipeline::new(front, "model", &schedule, &["front"]).unwrap_err();
        assert!(error.message().contains("1 workers for 2 ranks"), "{error}");
        let error = try_step(front, &two(front)).unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        assert!(error.message().contains("worker 'back' has no stage 1"), "{error}");
        let unknown = Pipeline::new(front, "model", &schedule, &["front", "nobody"]).unwrap();
        let error = try_step(front, &unknown).unwrap_err();
        assert!(error.message().contains("stage 1 on worker 'nobody'"), "{error}");
    });
}
