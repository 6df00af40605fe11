//! One function on several devices.
mod common;
use common::{alone, floats, weight};
use distgrad::{
    broadcast, gather, reduce_add, scatter, Code, DataParallel, DataParallelOptions, Error, Tensor,
};
use std::sync::{
    atomic::{AtomicUsize, Ordering},
    Arc, Mutex,
};

const TWICE: [&str; 2] = ["cpu", "cpu"];

fn on_two() -> DataParallelOptions {
    DataParallelOptions::new().devices(TWICE)
}

fn batch() -> Tensor {
    Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[3, 2]).unwrap()
}

#[test]
fn a_step_is_that_of_one_device() {
    fn may_cross_threads<T: Send + Sync>(_: &T) {}
    let worker = alone();
    let parameter = Tensor::from_slice(&[0.5f32, -1.0], &[2, 1]).unwrap().require_grad().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let ours = Arc::clone(&seen);
    let parallel = on_two()
        .create([&parameter], move |replica| {
            let x = replica.input(0)?;
            ours.lock().unwrap().push((replica.index(), replica.device().to_owned(), x.shape()[0]));
            Ok([x.matmul(replica.parameter(0)?)?.square()?])
        })
        .unwrap();
    may_cross_threads(&parallel);

    let step = |y: Tensor| {
        let context = worker.context().unwrap();
        context.backward([y.sum().unwrap()]).unwrap();
        context.gradient(&parameter).unwrap().to_vec::<f32>().unwrap()
    };
    let x = batch();
    let expected = x.matmul(&parameter).unwrap().square().unwrap();
    for _ in 0..2 {
        let y = parallel.forward([&x]).unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
        assert_eq!(step(y), step(x.matmul(&parameter).unwrap().square().unwrap()));
    }
    let taken = || {
        let mut seen = std::mem::take(&mut *seen.lock().unwrap());
        seen.sort();
        seen
    };
    let [first, second] = [(0, "cpu".to_owned(), 2), (1, "cpu".to_owned(), 1)];
    assert_eq!(taken(), [first.clone(), first, second.clone(), second]);

    // A batch of one leaves the second at rest.
    let small = parallel.forward([x.narrow(0, 0, 1).unwrap()]).unwrap();
    assert_eq!(small.shape(), [1, 1]);
    assert_eq!(taken(), [(0, "cpu".to_owned(), 1)]);
}

#[test]
fn several_inputs_and_outputs_and_gaps() {
    let statistics = floats(&[0.0]);
    let parallel = on_two()
        .dim(1)
        .output_device("cpu")
        .bucket_bytes(1 << 10)
        .timeout(common::LONG)
        .buffers([&statistics])
        .create([] as [Tensor; 0], |replica| {
            assert!(replica.parameters().is_empty() && replica.inputs()[1].is_none());
            assert_eq!(replica.input(1).unwrap_err().code(), Code::OutOfRange);
            assert_eq!(replica.parameter(0).unwrap_err().code(), Code::OutOfRange);
            // SAFETY: the replica's own.
            unsafe { replica.buffers()[0].fill_(1.0 + replica.index() as f64) }?;
            Ok([Some(replica.input(0)?.neg()?), None, Some(replica.input(2)?.exp()?)])
        })
        .unwrap();
    let x = batch();
    let outputs = parallel.forward_all(&[Some(&x), None, Some(&x)], 3).unwrap();
    let same = |output: &Option<Tensor>, expected: Tensor| {
        let output = output.as_ref().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(output, expected.to_vec::<f32>().unwrap());
    };
    same(&outputs[0], x.neg().unwrap());
    assert!(outputs[1].is_none());
    same(&outputs[2], x.exp().unwrap());
    assert_eq!(statistics.item::<f32>().unwrap(), 1.0); // what replica 0 made of it

    let error = parallel.forward_all(&[Some(&x), None, Some(&x)], 2).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    assert!(error.message().contains("3 outputs, and not 2"), "{error}");
}

#[test]
fn failures_and_panics_name_the_replica() {
    let fail = |how: fn(usize) -> Result<(), Error>| -> DataParallel {
        on_two()
            .create([] as [Tensor; 0], move |replica| {
                how(replica.index())?;
                Ok([replica.input(0)?.clone()])
            })
            .unwrap()
    };
    let wrong = fail(|index| match index {
        1 => Err(Error::new(Code::OutOfRange, "the end")),
        _ => Ok(()),
    });
    let panics = fail(|index| match index {
        1 => panic!("in the second"),
        _ => Ok(()),
    });
    for (parallel, code, text) in [
        (wrong, Code::OutOfRange, "the end"),
        (panics, Code::Internal, "the function panicked: in the second"),
    ] {
        let error = parallel.forward([batch()]).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(text) && error.message().contains("cpu"), "{error}");
    }
    let nowhere = DataParallelOptions::new().devices(["nowhere"]);
    assert!(nowhere.create([] as [Tensor; 0], |_| Ok([floats(&[1.0])])).is_err());
}

#[test]
fn the_function_is_dropped_with_it() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let function = |counted: Counted| {
        move |replica: &distgrad::Replica| {
            let _kept = &counted;
            Ok([replica.input(0)?.clone()])
        }
    };
    let parameter = weight(&[1.0]);
    let parallel = on_two().create([&parameter], function(Counted(Arc::clone(&dropped)))).unwrap();
    let output = parallel.forward([batch()]).unwrap();
    drop(parameter);
    assert_eq!(dropped.load(Ordering::SeqCst), 0);
    drop(parallel);
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    assert_eq!(output.shape(), [3, 2]);
    let refused = DataParallelOptions::new().devices(["nowhere"]);
    refused.create([weight(&[1.0])], function(Counted(Arc::clone(&dropped)))).unwrap_err();
    assert_eq!(dropped.load(Ordering::SeqCst), 2); // taken, though it failed
}

#[test]
fn pieces() {
    let x = batch();
    let rows = |parts: &[Tensor]| parts.iter().map(|part| part.shape()[0]).collect::<Vec<_>>();
    let parts = scatter(&x, &TWICE, 0, None).unwrap();
    assert_eq!(rows(&parts), [2, 1]);
    assert_eq!(rows(&scatter(&x, &TWICE, 0, Some(&[1, 2])).unwrap()), [1, 2]);
    assert_eq!(scatter(&x, &["cpu"; 5], 0, None).unwrap().len(), 3);
    let error = scatter(&x, &TWICE, 0, Some(&[3])).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);

    let whole = gather(&parts, None, 0).unwrap();
    assert_eq!(whole.to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
    assert_eq!(gather(&parts[..1], Some("cpu"), 1).unwrap().shape(), [2, 2]);

    let copies = broadcast([&x, &floats(&[7.0])], &["cpu"; 3]).unwrap();
    assert_eq!((copies.len(), copies[2].len()), (3, 2));
    assert_eq!(copies[2][1].item::<f32>().unwrap(), 7.0);

    let lists = [vec![Some(floats(&[1.0])), None], vec![Some(floats(&[2.0])), None]];
    let sums = reduce_add(&lists, Some("cpu")).unwrap();
    assert_eq!(sums[0].as_ref().unwrap().item::<f32>().unwrap(), 3.0);
    assert!(sums[1].is_none());
    let uneven = reduce_add(&[vec![Some(x)], vec![]], None).unwrap_err();
    assert_eq!(uneven.code(), Code::InvalidArgument);
}

/// Here, for the other tests of this program draw none, and those that make replicas do not, either.
#[test]
fn random_numbers_begin_anew() {
    let numbers = || Tensor::randn(&[3]).unwrap().to_vec::<f32>().unwrap();
    distgrad::manual_seed(7).unwrap();
    let first = numbers();
    assert_ne!(numbers(), first);
    distgrad::manual_seed(7).unwrap();
    assert_eq!(numbers(), first);
}
