//! Workers, calls, futures, contexts, optimizers.
mod common;
use common::{alone, alone_with, pair, LONG};
use distgrad::{
    values, Adam, Code, Context, Error, Future, Message, NoGrad, Optimizer, Sgd, Tensor, Value,
    Worker, WorkerOptions,
};
use std::{
    future::{poll_fn, Future as _, IntoFuture},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc, Arc,
    },
    task::{Poll, Wake, Waker},
    thread,
    time::Duration,
};

fn floats(data: &[f32]) -> Tensor {
    Tensor::from_slice(data, &[data.len() as i64]).unwrap()
}
fn weight(data: &[f32]) -> Tensor {
    floats(data).require_grad().unwrap()
}
fn empty() -> Message {
    Message::from_payload("").unwrap()
}

/// Runs a future on this thread.
fn block_on<T>(future: impl IntoFuture<Output = T>) -> T {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = Box::pin(future.into_future());
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn what_may_cross_threads() {
    fn check<T: Send + Sync>() {}
    check::<Worker>();
    check::<Context<'_>>();
    check::<Optimizer<'_>>();
    check::<Tensor>();
    check::<Message>();
    check::<Future<Message>>();
    check::<Future<()>>();
    check::<distgrad::Awaiting<Vec<Value<'static>>>>();
    check::<distgrad::Request<'_>>();
    check::<distgrad::Caller<'_>>();
    check::<Value<'_>>();
    check::<Error>();
}

#[test]
fn names_and_numbers() {
    pair(
        |back| assert_eq!((back.rank(), back.world_size()), (1, 2)),
        |front| {
            assert_eq!(front.name(0).as_deref(), Some("front"));
            assert_eq!(front.name(1).as_deref(), Some("back"));
            assert_eq!(front.name(2), None);
            assert_eq!(format!("{front:?}"), "Worker(0 of 2)");
        },
    );
    let lonely = WorkerOptions::new()
        .rank(0, 2)
        .rendezvous("tcp://127.0.0.1:0")
        .join_timeout(Duration::from_millis(50))
        .create();
    assert!(lonely.is_err());
    assert_eq!(WorkerOptions::new().rank(3, 2).create().unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn a_call_carries_bytes_and_tensors() {
    pair(
        |back| {
            let serve = |request: &distgrad::Request<'_>| {
                assert_eq!((request.function(), request.from()), ("swap", 0));
                assert!(request.context().is_none());
                assert!(request.timeout().is_some_and(|timeout| timeout <= LONG));
                let tensors = request.tensors()?;
                let turned: Vec<_> = tensors.iter().rev().map(Option::as_ref).collect();
                Ok(Message::with_gaps(request.text()?.to_uppercase(), &turned)?)
            };
            back.register("swap", serve).unwrap();
            assert_eq!(back.register("swap", serve).unwrap_err().code(), Code::AlreadyExists);
            assert_eq!(back.register("a::b", serve).unwrap_err().code(), Code::InvalidArgument);
        },
        |front| {
            let x = floats(&[1.0, 2.0]);
            let request = Message::with_gaps("text", &[Some(&x), None]).unwrap();
            assert_eq!(format!("{request:?}"), "Message(4 bytes, 2 tensors)");
            let reply = front.call("back", "swap", &request).unwrap();
            assert_eq!((reply.text().unwrap(), reply.tensor_count()), ("TEXT", 2));
            assert_eq!(reply.tensor(0).unwrap_err().code(), Code::NotFound);
            assert_eq!(reply.tensor(1).unwrap().to_vec::<f32>().unwrap(), [1.0, 2.0]);
            assert!(reply.tensor(2).is_err());
            assert!(Message::from_payload([0xff]).unwrap().text().is_err());

            let absent = front.call("back", "no such", &request).unwrap_err();
            assert_eq!(absent.code(), Code::NotFound);
            assert_eq!(front.call("nobody", "swap", &request).unwrap_err().code(), Code::NotFound);
        },
    );
}

#[test]
fn failures_and_panics_are_errors_at_the_caller() {
    struct Grumpy;
    impl Drop for Grumpy {
        fn drop(&mut self) {
            if !thread::panicking() {
                panic!("in a destructor");
            }
        }
    }
    let worker = alone();
    let grumpy = Grumpy;
    worker
        .register("coded", move |_| {
            let _kept = &grumpy;
            Err(Error::new(Code::OutOfRange, "the end").into())
        })
        .unwrap();
    worker.register("plain", |_| Err("no code".into())).unwrap();
    worker.register("panic", |_| panic!("number {}", 7)).unwrap();
    worker.register("strange", |_| std::panic::panic_any(7)).unwrap();
    for (function, code, text) in [
        ("coded", Code::OutOfRange, "the end"),
        ("plain", Code::Unknown, "no code"),
        ("panic", Code::Internal, "panicked: number 7"),
        ("strange", Code::Internal, "panicked"),
    ] {
        let error = worker.call("alone", function, &empty()).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(text), "{error}");
    }
    drop(worker); // and with it Grumpy: printed, and no more
}

#[test]
fn handlers_call_in_turn() {
    // One thread: it has to be free while the handler waits.
    let worker = alone_with(WorkerOptions::new().thread_count(1));
    worker
        .register("leaf", |request| Ok(Message::new("", [request.tensor(0)?.square()?])?))
        .unwrap();
    worker
        .register("relay", |request| {
            let message = Message::new("", [request.tensor(0)?])?;
            Ok(request.call("alone", "leaf", &message)?)
        })
        .unwrap();
    let x = weight(&[1.0, 2.0, 3.0]);
    let context = worker.context().unwrap();
    let reply = context.call("alone", "relay", &Message::new("", [&x]).unwrap()).unwrap();
    context.backward([reply.tensor(0).unwrap().sum().unwrap()]).unwrap();
    assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
}

#[test]
fn asynchronous_handlers() {
    // One thread for handlers that wait for each other.
    let worker = alone_with(WorkerOptions::new().thread_count(1));
    let (sender, receiver) = mpsc::channel::<Waker>();
    let (receiver, opened) = (std::sync::Mutex::new(receiver), Arc::new(AtomicUsize::new(0)));
    let seen = opened.clone();
    // Waits for what is not distgrad's: a flag that another handler sets.
    worker
        .register_async("wait", async move |request| {
            poll_fn(|context| match seen.load(Ordering::SeqCst) {
                0 => {
                    sender.send(context.waker().clone()).unwrap();
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            })
            .await;
            Ok(Message::new("", [request.tensor(0)?.square()?])?)
        })
        .unwrap();
    worker
        .register("open", move |_| {
            opened.store(1, Ordering::SeqCst);
            receiver.lock().unwrap().recv()?.wake();
            Ok(empty())
        })
        .unwrap();
    worker
        .register_async("both", async |request| {
            let message = Message::new("", [request.tensor(0)?])?;
            let wait = request.call_async("alone", "wait", &message)?;
            let open = request.call_async("alone", "open", &message)?;
            open.await?;
            Ok(wait.await?)
        })
        .unwrap();
    worker.register_async("fail", async |_| Err("not this one".into())).unwrap();
    worker.register_async("panic", async |_| panic!("nor this one")).unwrap();
    worker.register_async("never", async |_| std::future::pending().await).unwrap();

    let x = weight(&[1.0, 2.0]);
    let context = worker.context().unwrap();
    let reply = context.call("alone", "both", &Message::new("", [&x]).unwrap()).unwrap();
    context.backward([reply.tensor(0).unwrap().sum().unwrap()]).unwrap();
    assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [2.0, 4.0]);

    assert_eq!(worker.call("alone", "fail", &empty()).unwrap_err().code(), Code::Unknown);
    assert_eq!(worker.call("alone", "panic", &empty()).unwrap_err().code(), Code::Internal);
    let caller = worker.caller().timeout(Duration::from_millis(20));
    assert_eq!(caller.call("alone", "never", &empty()).unwrap_err().code(), Code::DeadlineExceeded);
}

#[test]
fn futures() {
    let worker = alone();
    let (open, gate) = mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    worker
        .register("wait", move |request| {
            gate.lock().unwrap().recv()?;
            Ok(Message::from_payload(request.payload())?)
        })
        .unwrap();
    let start = |text| {
        let message = Message::from_payload(text).unwrap();
        worker.call_async("alone", "wait", &message).unwrap()
    };

    let future = start("one");
    assert!(!future.is_done());
    assert!(future.wait_timeout(Duration::from_millis(1)).is_none());
    let (ran, running) = mpsc::channel();
    future.then(move || ran.send(()).unwrap()).unwrap();
    future.then(|| panic!("goes no further")).unwrap();
    open.send(()).unwrap();
    assert_eq!(future.wait().unwrap().text().unwrap(), "one");
    running.recv_timeout(LONG).unwrap();
    assert!(future.is_done());
    assert!(future.wait_timeout(LONG).unwrap().is_ok());
    let (ran, running) = mpsc::channel();
    future.then(move || ran.send(()).unwrap()).unwrap(); // done: at once
    running.try_recv().unwrap();
    assert_eq!(block_on(future).unwrap().text().unwrap(), "one"); // awaited when done

    // Awaited before it is done, and polled again meanwhile.
    let mut awaiting = start("two").into_future();
    for _ in 0..3 {
        let mut context = std::task::Context::from_waker(Waker::noop());
        assert!(std::pin::Pin::new(&mut awaiting).poll(&mut context).is_pending());
    }
    let opener = thread::spawn(move || {
        open.send(()).unwrap();
        open
    });
    assert_eq!(block_on(awaiting).unwrap().text().unwrap(), "two");
    let open = opener.join().unwrap();

    // Dropped: the work goes on. Its worker gone: an error.
    drop(start("three"));
    let last = start("four");
    drop(open);
    drop(worker);
    assert!(block_on(last).is_err());
}

#[test]
fn deadlines() {
    let worker = alone();
    let (open, gate) = mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    worker
        .register("wait", move |_| {
            let _ = gate.lock().unwrap().recv();
            Ok(empty())
        })
        .unwrap();
    let caller = worker.caller().timeout(Duration::from_millis(20));
    assert_eq!(caller.call("alone", "wait", &empty()).unwrap_err().code(), Code::DeadlineExceeded);
    let future = caller.call_async("alone", "wait", &empty()).unwrap();
    assert_eq!(future.wait().unwrap_err().code(), Code::DeadlineExceeded);
    drop(open);
}

#[test]
fn operators_of_other_workers() {
    pair(
        |_| (),
        |front| {
            let x = weight(&[1.0, 2.0]);
            let context = front.context().unwrap();
            let result = context.call_op("back", "aten::square", &values![&x]).unwrap().remove(0);
            let squares = Tensor::try_from(result).unwrap();
            context.backward([squares.sum().unwrap()]).unwrap();
            assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [2.0, 4.0]);
            let future = front.call_op_async("back", "aten::size.int", &values![&x, 0]).unwrap();
            assert_eq!(i64::try_from(block_on(future).unwrap().remove(0)).unwrap(), 2);
            let error = front.call_op("back", "aten::no_such", &[]).unwrap_err();
            assert_eq!(error.code(), Code::NotFound);
        },
    );
    let closed = alone_with(WorkerOptions::new().serve_operators(false));
    assert!(closed.call_op("alone", "aten::square", &values![&floats(&[1.0])]).is_err());
}

#[test]
fn backward_and_gradients() {
    let worker = alone();
    let x = weight(&[1.0, 2.0]);
    let y = x.square().unwrap();
    let context = worker.context().unwrap();
    assert_ne!(context.id(), 0);
    assert_eq!(worker.context_count(), 1);
    assert_eq!(context.gradient(&x).unwrap_err().code(), Code::NotFound);

    let start = floats(&[1.0, 10.0]);
    let wrong = context.pass().root_gradients(&[Some(&start), None]).run([&y]);
    assert_eq!(wrong.unwrap_err().code(), Code::InvalidArgument);
    context.pass().root_gradients(&[Some(&start)]).retain_graph().timeout(LONG).run([&y]).unwrap();
    assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [2.0, 40.0]);
    let again = context.pass().root_gradients(&[Some(&start)]).start([&y]).unwrap();
    block_on(again).unwrap();
    assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [4.0, 80.0]);

    context.set_gradient(&x, &floats(&[7.0, 8.0])).unwrap();
    let gradients = context.gradients().unwrap();
    assert_eq!(gradients.len(), 1);
    assert_eq!(gradients[0].0.to_vec::<f32>().unwrap(), [1.0, 2.0]);
    assert_eq!(gradients[0].1.to_vec::<f32>().unwrap(), [7.0, 8.0]);
    context.release().unwrap();
    context.release().unwrap();
    assert!(context.gradient(&x).is_err());
    drop(context);
    assert_eq!(worker.context_count(), 0);
}

#[test]
fn a_handler_sees_its_callers_context() {
    let worker = alone();
    let kept = weight(&[3.0]);
    let ours = kept.clone();
    worker
        .register("gradient", move |request| {
            let context = request.context().ok_or("no context")?;
            Ok(Message::new(context.id().to_string(), [context.gradient(&ours)?])?)
        })
        .unwrap();
    let context = worker.context().unwrap();
    context.backward([kept.square().unwrap()]).unwrap();
    let reply = context.call("alone", "gradient", &empty()).unwrap();
    assert_eq!(reply.text().unwrap(), context.id().to_string());
    assert_eq!(reply.tensor(0).unwrap().item::<f32>().unwrap(), 6.0);
    // The handler has not ended it.
    assert_eq!(context.gradient(&kept).unwrap().item::<f32>().unwrap(), 6.0);
}

#[test]
fn optimizers() {
    let worker = alone();
    let step = |optimizer: &Optimizer<'_>, parameter: &Tensor| {
        let context = worker.context().unwrap();
        context.backward([parameter.square().unwrap().sum().unwrap()]).unwrap();
        optimizer.step(&context).unwrap();
        parameter.item::<f32>().unwrap()
    };
    let parameters: Vec<_> = (0..4).map(|_| weight(&[1.0])).collect();
    let sgd = Sgd::new(0.1).create(&worker, "sgd", [&parameters[0]]).unwrap();
    assert_eq!(step(&sgd, &parameters[0]), 0.8);
    let heavy = Sgd::new(0.1).momentum(0.9).nesterov(true).weight_decay(0.0).dampening(0.0);
    let heavy = heavy.create(&worker, "heavy", [&parameters[1]]).unwrap();
    assert!((step(&heavy, &parameters[1]) - 0.62).abs() < 1e-6);
    // Adam's first step is the learning rate, whatever the gradient.
    let adam = Adam::new(0.1).betas(0.8, 0.9).epsilon(1e-12).amsgrad(true);
    let adam = adam.create(&worker, "adam", [&parameters[2]]).unwrap();
    assert!((step(&adam, &parameters[2]) - 0.9).abs() < 1e-6);
    let adamw = Adam::decoupled(0.1).weight_decay(0.5).create(&worker, "adamw", [&parameters[3]]);
    assert!((step(&adamw.unwrap(), &parameters[3]) - 0.85).abs() < 1e-6);
    let twice = Sgd::new(0.1).create(&worker, "sgd", [&parameters[0]]);
    assert_eq!(twice.unwrap_err().code(), Code::AlreadyExists);
}

#[test]
fn whatever_is_dropped_first() {
    let x = weight(&[1.0]);
    let mut handles: Vec<Box<dyn std::any::Any>> = Vec::new();
    {
        let worker = alone();
        worker.register("echo", |request| Ok(Message::new("", [request.tensor(0)?])?)).unwrap();
        let message = Message::new("", [&x]).unwrap();
        let future = worker.call_async("alone", "echo", &message).unwrap();
        let reply = future.wait().unwrap();
        drop(message);
        handles.push(Box::new(reply.tensor(0).unwrap()));
        handles.push(Box::new(reply));
        handles.push(Box::new(future));
        let context = worker.context().unwrap();
        let optimizer = Sgd::new(0.1).create(&worker, "", [&x]).unwrap();
        drop(optimizer);
        drop(context);
    }
    drop(x);
    while !handles.is_empty() {
        handles.swap_remove(0);
    }
}

#[test]
fn closures_are_dropped_with_their_worker() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let worker = alone();
    let serve = |counted: Counted| {
        move |_: &distgrad::Request<'_>| {
            let _kept = &counted;
            Ok(empty())
        }
    };
    worker.register("one", serve(Counted(dropped.clone()))).unwrap();
    worker.register("one", serve(Counted(dropped.clone()))).unwrap_err();
    assert_eq!(dropped.load(Ordering::SeqCst), 1); // taken, though it failed
    worker.call("alone", "one", &empty()).unwrap();
    drop(worker);
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
}

#[test]
fn many_threads_at_once() {
    pair(
        |back| {
            back.register("double", |request| {
                Ok(Message::new("", [request.tensor(0)?.mul_scalar(2.0)?])?)
            })
            .unwrap();
        },
        |front| {
            thread::scope(|scope| {
                for i in 0..4 {
                    scope.spawn(move || {
                        for j in 0..25 {
                            let x = weight(&[i as f32, j as f32]);
                            let context = front.context().unwrap();
                            let message = Message::new("", [&x]).unwrap();
                            let reply = context.call("back", "double", &message).unwrap();
                            let y = reply.tensor(0).unwrap();
                            assert_eq!(
                                y.to_vec::<f32>().unwrap(),
                                [2.0 * i as f32, 2.0 * j as f32]
                            );
                            context.backward([y.sum().unwrap()]).unwrap();
                            assert_eq!(
                                context.gradient(&x).unwrap().to_vec::<f32>().unwrap(),
                                [2.0; 2]
                            );
                        }
                    });
                }
            });
            let _no_grad = NoGrad::new();
        },
    );
}
