//! Processes that compute the same thing together; here they are threads.
mod common;
use common::{floats, weight, Folder, LONG};
use distgrad::{
    BackwardOptions, Code, Context, Error, GradientAveragerOptions, PipelineOptions, PipelineStage,
    PipelineStages, PipelineStagesOptions, ProcessGroup, ProcessGroupOptions, Reduction, Schedule,
    Tensor, Worker,
};
use std::{thread, time::Duration};

/// Runs `rank` with each of two workers, in a group of both.
fn on_both(rank: impl Fn(&Worker, &ProcessGroup) + Sync) {
    let folder = Folder::new();
    thread::scope(|scope| {
        for place in [0, 1] {
            let (folder, rank) = (&folder, &rank);
            scope.spawn(move || {
                let worker = folder.options().rank(place, 2).create().unwrap();
                let group = ProcessGroupOptions::new()
                    .name("replicas")
                    .backend("gloo")
                    .host("127.0.0.1")
                    .timeout(LONG)
                    .create(&worker)
                    .unwrap();
                assert_eq!((group.rank(), group.size()), (place, 2));
                rank(&worker, &group);
                worker.shutdown(LONG).unwrap();
            });
        }
    });
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}

#[test]
fn collectives() {
    fn may_cross_threads<T: Send + Sync>(_: &T) {}
    on_both(|worker, group| {
        may_cross_threads(group);
        let mine = worker.rank() as f32;
        let [x, y] = [floats(&[mine, 2.0 * mine]), floats(&[4.0 - mine])];
        group.average([&x, &y]).unwrap();
        assert_eq!((numbers(&x), numbers(&y)), (vec![0.5, 1.0], vec![3.5]));
        let z = floats(&[mine]);
        group.broadcast([&z], 1).unwrap();
        assert_eq!(numbers(&z), [1.0]);
        assert_eq!(format!("{group:?}"), format!("ProcessGroup({} of 2)", worker.rank()));
    });
}

/// A backward whose gradient of `parameter` is `factor`.
fn backward<'w>(worker: &'w Worker, parameter: &Tensor, factor: f64) -> Context<'w> {
    let context = worker.context().unwrap();
    context.backward([parameter.mul_scalar(factor).unwrap().sum().unwrap()]).unwrap();
    context
}

#[test]
fn gradients_are_averaged_and_a_rank_may_run_out() {
    on_both(|worker, group| {
        let mine = f64::from(worker.rank());
        let parameter = weight(&[1.0 + mine as f32]);
        let buffer = floats(&[5.0 + mine as f32]);
        let averager = GradientAveragerOptions::new()
            .divide_by_active(true)
            .bucket_bytes(1 << 10)
            .buffers([&buffer])
            .create(group, [&parameter])
            .unwrap();
        // Those of rank 0.
        assert_eq!((numbers(&parameter), numbers(&buffer)), (vec![1.0], vec![5.0]));

        let context = backward(worker, &parameter, 2.0 + 2.0 * mine);
        averager.average(&context).unwrap();
        assert_eq!(numbers(&context.gradient(&parameter).unwrap()), [3.0]);
        // The one has a step more than the other, with two averages.
        let context = worker.context().unwrap();
        for sum in [7.0, 10.0] {
            if worker.rank() == 0 {
                let factor = if sum == 7.0 { 7.0 } else { 3.0 };
                let loss = parameter.mul_scalar(factor).unwrap().sum().unwrap();
                context.backward_with([&loss], &BackwardOptions::new().retain_graph(true)).unwrap();
                averager.average(&context).unwrap();
            } else if sum == 7.0 {
                assert!(averager.join(&context).unwrap());
            } else {
                let error = averager.join(&context).unwrap_err();
                assert_eq!(error.code(), Code::FailedPrecondition);
                assert!(averager.join_keeping_gradients(&context).unwrap());
            }
            assert_eq!(numbers(&context.gradient(&parameter).unwrap()), [sum]);
        }
        assert!(!averager.join(&worker.context().unwrap()).unwrap());
    });
}

#[test]
fn averages_begin_while_the_backward_runs() {
    on_both(|worker, group| {
        let mine = f64::from(worker.rank());
        let parameter = weight(&[1.0]);
        let averager = GradientAveragerOptions::new().create(group, [&parameter]).unwrap();
        let context = worker.context().unwrap();
        averager.average_in_backward(&context).unwrap();
        let loss = parameter.mul_scalar(2.0 + 2.0 * mine).unwrap().sum().unwrap();
        context.backward_with([&loss], &BackwardOptions::new().retain_graph(true)).unwrap();
        averager.average(&context).unwrap();
        assert_eq!(numbers(&context.gradient(&parameter).unwrap()), [3.0]);
    });
}

/// Each of the two has a pipeline of one stage, which averages by itself over both.
#[test]
fn replicas_of_a_pipeline_average_in_its_steps() {
    on_both(|worker, group| {
        let mine = worker.rank() as f32;
        let weight = weight(&[1.0 + mine]);
        let averager = GradientAveragerOptions::new().create(group, [&weight]).unwrap();
        assert_eq!(numbers(&weight), [1.0]); // rank 0's
        let own = weight.clone();
        let stage = PipelineStage::new(0, move |batch| Ok([batch.input(0)?.mul(&own)?]))
            .loss(|batch| Ok(batch.output(0)?.sum()?))
            .targets(Some(0));
        let options = PipelineStagesOptions::new().num_threads(1).averager(&averager);
        let stages = options.create(worker, "replica", [stage]).unwrap();
        drop(averager); // the stages keep what it stands for
        let schedule = Schedule::gpipe(1, 2).unwrap();
        let name = worker.name(worker.rank()).unwrap();
        let pipeline = PipelineOptions::new()
            .reduction(Reduction::Sum)
            .create(worker, "replica", &schedule, &[&name])
            .unwrap();
        let x = Tensor::from_slice(&[1.0 + mine, 2.0], &[2, 1]).unwrap();
        let context = worker.context().unwrap();
        pipeline.train(&context, &[&x], &[]).unwrap();
        // Of 1 + 2, and of 2 + 2.
        assert_eq!(numbers(&context.gradient(&weight).unwrap()), [3.5]);
        drop((context, pipeline, stages));
    });
}

/// Two stages of one worker, each with a copy of the same parameter: x * w * w.
#[test]
fn tied_parameters_have_the_sum_of_their_gradients() {
    let folder = Folder::new();
    let worker = folder.options().rank(0, 1).create().unwrap();
    let weights = [weight(&[2.0]), weight(&[2.0])];
    let stages = weights.iter().zip(0..).map(|(weight, number)| {
        let own = weight.clone();
        PipelineStage::new(number, move |batch| Ok([batch.input(0)?.mul(&own)?]))
            .loss(|batch| Ok(batch.output(0)?.sum()?))
            .targets(Some(0))
            .tied("w", weight)
    });
    let stages = PipelineStages::new(&worker, "tied", stages).unwrap();
    let name = worker.name(0).unwrap();
    let pipeline = PipelineOptions::new()
        .reduction(Reduction::Sum)
        .create(&worker, "tied", &Schedule::gpipe(2, 2).unwrap(), &[&name, &name])
        .unwrap();
    let x = Tensor::from_slice(&[1.0f32, 2.0], &[2, 1]).unwrap();
    let context = worker.context().unwrap();
    pipeline.train(&context, &[&x], &[]).unwrap();
    for weight in &weights {
        // Of either stage (1 + 2) * 2.
        assert_eq!(numbers(&context.gradient(weight).unwrap()), [12.0]);
    }
    let frozen = floats(&[2.0]);
    let stage = PipelineStage::new(0, |batch| Ok([batch.input(0)?.clone()])).tied("w", &frozen);
    let error = PipelineStages::new(&worker, "frozen", [stage]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    drop((context, pipeline, stages));
}

#[test]
fn an_output_skips_to_a_later_stage() {
    let folder = Folder::new();
    let worker = folder.options().rank(0, 1).create().unwrap();
    let w = weight(&[2.0]);
    let own = w.clone();
    let make = move |to: u64| {
        let own = own.clone();
        let first = PipelineStage::new(0, move |batch| {
            let y = batch.input(0)?.mul(&own)?;
            Ok([y.clone(), y])
        });
        let second = PipelineStage::new(1, |batch| Ok([batch.input(0)?.mul_scalar(2.0)?]));
        let third = PipelineStage::new(2, |batch| Ok([batch.input(0)?.add(batch.input(1)?)?]))
            .inputs(Some(2))
            .loss(|batch| Ok(batch.output(0)?.sum()?))
            .targets(Some(0));
        [first.skips([to]), second, third]
    };
    let name = worker.name(0).unwrap();
    let x = Tensor::from_slice(&[1.0f32, 2.0], &[2, 1]).unwrap();
    for (to, pipeline) in [(2, "skips"), (1, "does not skip")] {
        let stages = PipelineStages::new(&worker, pipeline, make(to)).unwrap();
        let pipeline = PipelineOptions::new()
            .reduction(Reduction::Sum)
            .create(&worker, pipeline, &Schedule::gpipe(3, 2).unwrap(), &[&name, &name, &name])
            .unwrap();
        let context = worker.context().unwrap();
        let trained = pipeline.train(&context, &[&x], &[]);
        if to == 2 {
            trained.unwrap();
            // 2 x + x, of 1 and 2.
            assert_eq!(numbers(&context.gradient(&w).unwrap()), [9.0]);
        } else {
            let error = trained.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
            assert!(error.message().contains("skips to stage 1"), "{error}");
        }
        drop((context, pipeline, stages));
    }
}

#[test]
fn a_rank_that_cannot_go_on_takes_the_others_with_it() {
    on_both(|worker, group| {
        worker.barrier(LONG).unwrap(); // both have it
        if worker.rank() == 0 {
            group.fail(&Error::new(Code::DataLoss, "the disk is full")).unwrap();
        }
        let error = group.average([&floats(&[1.0])]).unwrap_err();
        let code = if worker.rank() == 0 { Code::DataLoss } else { Code::Unavailable };
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains("the disk is full"), "{error}");
    });
}

#[test]
fn who_does_not_fit_or_come_is_named() {
    on_both(|worker, group| {
        let shape = [1 + i64::from(worker.rank())];
        let parameter = Tensor::zeros(&shape, distgrad::Dtype::FLOAT32).unwrap();
        let parameter = parameter.require_grad().unwrap();
        let error = GradientAveragerOptions::new().create(group, [&parameter]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    });
    let folder = Folder::new();
    let worker = folder.options().rank(0, 1).create().unwrap();
    let lonely = ProcessGroupOptions::new().rank(0, 2).timeout(LONG);
    let error = lonely.join_timeout(Duration::from_millis(50)).create(&worker).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
}
