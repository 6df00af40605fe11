//! Workers, calls, contexts, optimizers.
mod common;
use common::{alone, alone_with, block_on, empty, floats, pair, weight, LONG};
use distgrad::{
    values, Adam, BackwardOptions, Code, Context, Error, Future, Message, NoGrad, Optimizer, Sgd,
    Tensor, Value, Worker, WorkerOptions,
};
use std::{
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc, Arc, Mutex,
    },
    thread,
    time::Duration,
};

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
    check::<distgrad::Cancellation>();
    check::<distgrad::Responder>();
    check::<distgrad::DataParallel>();
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
fn errors_say_where_they_arose() {
    use distgrad::{Origin, OriginKind::*};
    pair(
        |back| {
            back.register("find", |_| Err(Error::new(Code::NotFound, "no record").into())).unwrap();
            // Passes on what it is told; and says it in words of its own.
            let ask = |request: &distgrad::Request<'_>| {
                Ok(request.call("front", request.text()?, &empty())?)
            };
            back.register("ask", ask).unwrap();
            let hide = move |request: &distgrad::Request<'_>| {
                ask(request).map_err(|error: Box<dyn std::error::Error + Send + Sync>| {
                    error.to_string().into()
                })
            };
            back.register("hide", hide).unwrap();
        },
        |front| {
            front.register("panic", |_| panic!("on purpose")).unwrap();
            for (function, text, rank, kind) in [
                ("find", "", 1, Handler),
                ("absent", "", 1, Distgrad),
                ("ask", "panic", 0, Handler),
                ("ask", "absent", 0, Distgrad),
                ("hide", "absent", 1, Handler),
            ] {
                let request = Message::from_payload(text).unwrap();
                let error = front.call("back", function, &request).unwrap_err();
                assert_eq!(error.origin(), Some(Origin { rank, kind }), "{function}: {error}");
                let error = front.call_each(&["back"], function, &request).unwrap().remove(0);
                assert_eq!(error.unwrap_err().origin(), Some(Origin { rank, kind }), "{function}");
            }
        },
    );
    assert_eq!(Error::new(Code::NotFound, "here").origin(), None);
}

/// An error of a program's own, which has the one that it comes of.
#[derive(Debug)]
struct Wrapped {
    text: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl std::fmt::Display for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Wrapped {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.source.as_ref())
    }
}

fn wrap(text: &str, source: Box<dyn std::error::Error + Send + Sync>) -> Wrapped {
    Wrapped { text: text.to_owned(), source }
}

#[test]
fn errors_say_what_they_come_of() {
    use distgrad::{Origin, OriginKind::*};
    pair(
        |back| {
            back.register("ask", |request| {
                let asked = request.call("front", request.text()?, &empty());
                let again = |error| wrap("step 7", wrap("loading", error).into());
                Ok(asked.map_err(|error| again(error.into()))?)
            })
            .unwrap();
            back.register("read", |_| Err(wrap("loading", "no such file".into()).into())).unwrap();
            back.register("say", |_| Err(wrap("x: no such file", "no such file".into()).into()))
                .unwrap();
        },
        |front| {
            front.register("find", |_| Err(Error::new(Code::OutOfRange, "end").into())).unwrap();
            for (function, text, code, origin, said) in [
                ("ask", "find", Code::OutOfRange, (0, Handler), "step 7: loading: "),
                ("ask", "absent", Code::NotFound, (0, Distgrad), "absent"),
                ("read", "", Code::Unknown, (1, Handler), "loading: no such file"),
                ("say", "", Code::Unknown, (1, Handler), "x: no such file"),
            ] {
                let request = Message::from_payload(text).unwrap();
                let error = front.call("back", function, &request).unwrap_err();
                let (rank, kind) = origin;
                let origin = Some(Origin { rank, kind });
                assert_eq!((error.code(), error.origin()), (code, origin), "{function}: {error}");
                assert!(error.message().contains(said), "{error}");
                assert!(error.message().matches("no such file").count() <= 1, "{error}");
            }
        },
    );
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
    let wrong = BackwardOptions::new().root_gradients(&[Some(&start), None]);
    let wrong = context.backward_with([&y], &wrong);
    assert_eq!(wrong.unwrap_err().code(), Code::InvalidArgument);
    let options = BackwardOptions::new().root_gradients(&[Some(&start)]);
    context.backward_with([&y], &options.clone().retain_graph(true).timeout(LONG)).unwrap();
    assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [2.0, 40.0]);
    let again = context.backward_async([&y], &options).unwrap();
    block_on(again).unwrap();
    assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [4.0, 80.0]);

    context.set_gradient(&x, &floats(&[7.0, 8.0])).unwrap();
    let short = context.set_gradient(&x, &floats(&[7.0])).unwrap_err();
    assert_eq!(short.code(), Code::InvalidArgument);
    let gradients = context.gradients().unwrap();
    assert_eq!(gradients.len(), 1);
    assert_eq!(gradients[0].0.to_vec::<f32>().unwrap(), [1.0, 2.0]);
    assert_eq!(gradients[0].1.to_vec::<f32>().unwrap(), [7.0, 8.0]);
    context.release().unwrap();
    context.release().unwrap();
    assert!(context.gradient(&x).is_err());
    assert_eq!(context.gradients().unwrap_err().code(), Code::FailedPrecondition);
    drop(context);
    assert_eq!(worker.context_count(), 0);
}

#[test]
fn a_caller_without_a_deadline_has_no_timeout() {
    let worker = alone();
    worker
        .register("nested", |request| {
            let nested = request.caller().call("alone", "waits", &empty())?;
            Ok(Message::from_payload(format!("{:?} {}", request.timeout(), nested.text()?))?)
        })
        .unwrap();
    worker
        .register("waits", |request| Ok(Message::from_payload(format!("{:?}", request.timeout()))?))
        .unwrap();
    let caller = worker.caller().timeout(Duration::MAX);
    let reply = caller.call("alone", "nested", &empty()).unwrap();
    assert_eq!(reply.text().unwrap(), "None None");
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
    let adamw = Adam::adamw(0.1).weight_decay(0.5).create(&worker, "adamw", [&parameters[3]]);
    assert!((step(&adamw.unwrap(), &parameters[3]) - 0.85).abs() < 1e-6);
    let twice = Sgd::new(0.1).create(&worker, "sgd", [&parameters[0]]);
    assert_eq!(twice.unwrap_err().code(), Code::AlreadyExists);
    let named = Adam::new(0.1).create(&worker, "net::head", [&parameters[0]]);
    assert_eq!(named.unwrap_err().code(), Code::InvalidArgument);

    let name = worker.name(0).unwrap();
    sgd.set_workers(&[name.as_str()]).unwrap();
    let lacking = sgd.set_workers(&["somebody"]).unwrap_err();
    assert_eq!(lacking.code(), Code::InvalidArgument);
    assert!(lacking.to_string().contains(&name), "{lacking}");

    // A schedule: smaller steps, of the same optimizer.
    sgd.set_learning_rate(0.05).unwrap();
    assert!((step(&sgd, &parameters[0]) - 0.72).abs() < 1e-6);
    adam.set_learning_rate(0.0).unwrap();
    let before = parameters[2].item::<f32>().unwrap();
    assert_eq!(step(&adam, &parameters[2]), before);
    let negative = sgd.set_learning_rate(-1.0).unwrap_err();
    assert_eq!(negative.code(), Code::InvalidArgument);
}

#[test]
fn local_optimizers() {
    let (x, y) = (weight(&[1.0, 2.0]), weight(&[1.0, 2.0]));
    let (worker, other) = (alone(), alone());
    let train = |worker: &Worker, x: &Tensor, optimizer: &Optimizer<'_>| {
        let context = worker.context().unwrap();
        context.backward([x.square().unwrap().sum().unwrap()]).unwrap();
        let norm = optimizer.clip_gradients(&context, 0.5).unwrap();
        optimizer.set_learning_rate(1.0 / norm).unwrap();
        optimizer.step(&context).unwrap();
        x.to_vec::<f32>().unwrap()
    };
    let sgd = Sgd::new(0.1).momentum(0.9);
    let (local, of_worker) = (sgd.create_local([&x]), sgd.create(&worker, "", [&y]));
    let (local, of_worker) = (local.unwrap(), of_worker.unwrap());
    for step in 0..4 {
        // It takes contexts of any worker.
        let worker_of_local = if step % 2 == 0 { &other } else { &worker };
        assert_eq!(train(worker_of_local, &x, &local), train(&worker, &y, &of_worker));
    }
    assert_eq!(local.set_workers(&["alone"]).unwrap_err().code(), Code::FailedPrecondition);
    let adamw = Adam::adamw(0.1).create_local([&x]).unwrap();
    adamw.load_state(adamw.state().unwrap()).unwrap();
    drop(of_worker);
    drop(worker);
    let before = x.to_vec::<f32>().unwrap();
    assert!(train(&other, &x, &adamw)[0] < before[0]);
    adamw.remove().unwrap();
    assert_eq!(adamw.state().unwrap_err().code(), Code::NotFound);
    let leafless = Sgd::new(0.1).create_local([&x.square().unwrap()]);
    assert_eq!(leafless.unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn the_state_of_an_optimizer() {
    let worker = alone();
    let train = |x: &Tensor, optimizer: &Optimizer<'_>| {
        let context = worker.context().unwrap();
        context.backward([x.square().unwrap().sum().unwrap()]).unwrap();
        optimizer.step(&context).unwrap();
    };
    let x = weight(&[1.0, 2.0]);
    let optimizer = Adam::new(0.1).create(&worker, "", [&x]).unwrap();
    train(&x, &optimizer);
    let saved = optimizer.state().unwrap();
    let find = |name: &str| saved.iter().find(|(known, _)| known == name).unwrap().1.clone();
    assert_eq!(find("state.0.step").to_vec::<i64>().unwrap(), [1]);
    assert_eq!(find("param_groups.0.betas").to_vec::<f64>().unwrap(), [0.9, 0.999]);
    let y = weight(&x.to_vec::<f32>().unwrap());
    train(&x, &optimizer);

    // Another one goes on from there, as this one did.
    optimizer.remove().unwrap();
    optimizer.remove().unwrap();
    assert_eq!(optimizer.state().unwrap_err().code(), Code::NotFound);
    let other = Adam::new(7.0).create(&worker, "", [&y]).unwrap();
    let short = other.load_state(saved.iter().skip(1).map(|(name, tensor)| (name, tensor)));
    assert!(short.unwrap_err().message().contains("'param_groups.0.lr' is missing"));
    other.load_state(saved).unwrap();
    train(&y, &other);
    assert_eq!(x.to_vec::<f32>().unwrap(), y.to_vec::<f32>().unwrap());
}

#[test]
fn gradients_are_clipped_over_all_workers() {
    let [ours, theirs] = [weight(&[3.0]), weight(&[4.0])];
    let half = |x: &Tensor| x.square()?.sum()?.mul_scalar(0.5);
    let served = theirs.clone();
    pair(
        move |back| {
            back.register("loss", move |_| Ok(Message::new("", [half(&served)?])?)).unwrap();
            // The part lasts as long as the worker.
            drop(Sgd::new(0.1).create(back, "", [&theirs]).unwrap());
        },
        |front| {
            let sgd = Sgd::new(0.1).create(front, "", [&ours]).unwrap();
            let context = front.context().unwrap();
            assert_eq!(sgd.clip_gradients(&context, 1.0).unwrap(), 0.0);
            let loss = context.call("back", "loss", &empty()).unwrap().tensor(0).unwrap();
            context.backward([loss.add(&half(&ours).unwrap()).unwrap()]).unwrap();
            assert_eq!(sgd.clip_gradients(&context, 6.0).unwrap(), 5.0);
            assert_eq!(sgd.clip_gradients(&context, 1.0).unwrap(), 5.0);
            let clipped = context.gradient(&ours).unwrap().item::<f32>().unwrap();
            assert!((clipped - 0.6).abs() < 1e-6, "{clipped}");

            let negative = sgd.clip_gradients(&context, -1.0).unwrap_err();
            assert_eq!(negative.code(), Code::InvalidArgument);
            context.set_gradient(&ours, &floats(&[f32::INFINITY])).unwrap();
            let infinite = sgd.clip_gradients(&context, 1.0).unwrap_err();
            assert_eq!(infinite.code(), Code::OutOfRange);
        },
    );
}

#[test]
fn gradients_of_several_contexts_are_one_step() {
    let [ours, theirs] = [weight(&[3.0]), weight(&[4.0])];
    let (served, after) = (theirs.clone(), theirs.clone());
    pair(
        move |back| {
            back.register("square", move |_| Ok(Message::new("", [served.square()?.sum()?])?))
                .unwrap();
            // The part lasts as long as the worker.
            drop(Sgd::new(0.25).create(back, "", [&theirs]).unwrap());
        },
        |front| {
            let sgd = Sgd::new(0.25).create(front, "", [&ours]).unwrap();
            let contexts = [(); 3].map(|()| front.context().unwrap());
            for context in &contexts {
                let there = context.call("back", "square", &empty()).unwrap().tensor(0).unwrap();
                context.backward([there.add(&ours.sum().unwrap()).unwrap()]).unwrap();
            }
            front.sum_gradients(&contexts).unwrap();
            assert_eq!(contexts[0].gradient(&ours).unwrap().item::<f32>().unwrap(), 3.0);
            assert_eq!(contexts[1].gradient(&ours).unwrap_err().code(), Code::NotFound);
            sgd.step(&contexts[0]).unwrap();
            assert_eq!(ours.to_vec::<f32>().unwrap(), [3.0 - 0.25 * 3.0]);
            assert_eq!(after.to_vec::<f32>().unwrap(), [4.0 - 0.25 * 24.0]);

            let twice = front.sum_gradients([&contexts[0], &contexts[0]]).unwrap_err();
            assert_eq!(twice.code(), Code::InvalidArgument);
            assert_eq!(front.sum_gradients([]).unwrap_err().code(), Code::InvalidArgument);
        },
    );
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
fn a_close_waits_for_no_longer_than_it_is_told() {
    let worker = alone();
    let (entered, has_entered) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    worker
        .register("hold", move |request| {
            entered.send(()).unwrap();
            assert_eq!(
                request.call("alone", "", &empty()).unwrap_err().code(),
                Code::InvalidArgument
            );
            released.lock().unwrap().recv().unwrap();
            Ok(empty())
        })
        .unwrap();
    let call = worker.call_async("alone", "hold", &empty()).unwrap();
    has_entered.recv_timeout(LONG).unwrap();
    assert_eq!(worker.close(Duration::ZERO).unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(call.wait().unwrap_err().code(), Code::Cancelled);
    assert_eq!(worker.barrier(None).unwrap_err().code(), Code::FailedPrecondition);
    release.send(()).unwrap();
    worker.close(None).unwrap();
    // What the handler had has ended with it.
    assert!(release.send(()).is_err());
    worker.close(Duration::ZERO).unwrap();
}

#[test]
fn a_handler_may_drop_its_worker() {
    let drop_it = Arc::new(Mutex::new(None::<Worker>));
    let (ends_with_handler, ended) = mpsc::channel::<()>();
    let worker = alone();
    let inside = drop_it.clone();
    worker
        .register("drop", move |_| {
            let _keep = &ends_with_handler;
            drop(inside.lock().unwrap().take());
            Ok(empty())
        })
        .unwrap();
    let call = {
        let mut slot = drop_it.lock().unwrap(); // the handler waits for what is put there
        let call = worker.call_async("alone", "drop", &empty()).unwrap();
        *slot = Some(worker);
        call
    };
    let _ = call.wait(); // the end of the worker may be first
    assert_eq!(ended.recv_timeout(LONG).unwrap_err(), mpsc::RecvTimeoutError::Disconnected);
}

#[test]
fn the_log_and_the_threads_of_operators() {
    let (lines, logged) = mpsc::channel();
    distgrad::set_log_sink(move |severity, text| {
        lines.send((severity, text.to_owned())).unwrap();
        panic!("goes no further");
    })
    .unwrap();
    let worker = alone();
    worker.start_trace(std::num::NonZeroU64::new(1)).unwrap();
    let absent = worker.call("alone", "absent", &empty()); // is in the trace, and does not fit
    assert_eq!(absent.unwrap_err().code(), Code::NotFound);
    worker.stop_trace().unwrap();
    distgrad::remove_log_sink().unwrap();
    // Other tests of this process may have said something as well.
    let lines: Vec<_> = logged.iter().collect();
    assert!(lines.iter().any(|(severity, text)| *severity == distgrad::Severity::Warning
        && text.contains("did not fit into the trace")));

    assert!(distgrad::grad_enabled());
    {
        let _no_grad = NoGrad::new();
        assert!(!distgrad::grad_enabled());
    }
    let before = distgrad::num_threads();
    distgrad::set_num_threads(3).unwrap();
    assert_eq!(distgrad::num_threads(), 3);
    assert_eq!(distgrad::set_num_threads(0).unwrap_err().code(), Code::InvalidArgument);
    distgrad::set_num_threads(before).unwrap();
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
