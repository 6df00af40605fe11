//! The feature tch.
#![cfg(feature = "tch")]
mod common;
use common::{alone, pair};
use distgrad::{Code, Message, Tensor};
use tch::{Device, Kind};

fn floats(tensor: &tch::Tensor) -> Vec<f32> {
    Vec::try_from(tensor).unwrap()
}

#[test]
fn memory_and_history_are_shared() {
    let x = tch::Tensor::from_slice(&[1.0f32, 2.0, 3.0]).set_requires_grad(true);
    let y = &x * 3.0;
    let ours = Tensor::try_from(&y).unwrap();
    assert_eq!((ours.shape(), ours.requires_grad()), (vec![3], true));
    let back = tch::Tensor::from(&ours);
    assert_eq!(back.data_ptr(), y.data_ptr());
    drop(ours);
    back.square().sum(Kind::Float).backward(); // torch's own, through the graph of tch
    assert_eq!(floats(&x.grad()), [18.0, 36.0, 54.0]);
}

#[test]
fn two_libtorches_are_an_error_that_names_both() {
    let check = distgrad::check_one_libtorch;
    check("2.11.0", "2.11.0", true).unwrap();
    check("2.11.0", "2.11.0+cu130", true).unwrap();
    let error = check("2.11.0", "2.10.1", true).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    let text = error.message();
    assert!(text.contains("libtorch 2.11.0,") && text.contains("libtorch 2.10.1,"), "{text}");
    let error = check("2.11.0", "2.11.0", false).unwrap_err();
    assert!(error.message().contains("another copy"), "{error}");
    // What runs here.
    check("2.11.0", distgrad::torch_version(), true).unwrap();
}

#[test]
fn a_model_of_tch_trains_across_workers() {
    pair(
        |back| {
            back.register("square", |request| {
                let x = tch::Tensor::from(&request.tensor(0)?);
                Ok(Message::new("", [Tensor::try_from(&x.square())?])?)
            })
            .unwrap();
        },
        |front| {
            let x = tch::Tensor::from_slice(&[1.0f32, 2.0]).set_requires_grad(true);
            let hidden = &x * 3.0;
            let context = front.context().unwrap();
            let message = Message::new("", [Tensor::try_from(&hidden).unwrap()]).unwrap();
            let reply = context.call("back", "square", &message).unwrap();
            let loss = tch::Tensor::from(&reply.tensor(0).unwrap()).sum(Kind::Float);
            context.backward([Tensor::try_from(&loss).unwrap()]).unwrap();
            let gradient = context.gradient(&Tensor::try_from(&x).unwrap()).unwrap();
            assert_eq!(floats(&(&gradient).into()), [18.0, 36.0]);
            assert!(!x.grad().defined(), "gradients are the context's");
        },
    );
}

#[test]
fn panics_of_tch_are_errors_at_the_caller() {
    let worker = alone();
    worker
        .register("bad", |request| {
            let x = tch::Tensor::from(&request.tensor(0)?);
            let wrong = tch::Tensor::zeros([7, 7], (Kind::Float, Device::Cpu));
            Ok(Message::new("", [Tensor::try_from(&x.matmul(&wrong))?])?)
        })
        .unwrap();
    let x = Tensor::from_slice(&[1.0f32; 4], &[2, 2]).unwrap();
    let error = worker.call("alone", "bad", &Message::new("", [x]).unwrap()).unwrap_err();
    assert_eq!(error.code(), Code::Internal, "{error}");
}
