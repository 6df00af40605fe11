//! Futures, asynchronous handlers, and handlers that wait.
mod common;
use common::{alone, alone_with, block_on, empty, weight, LONG};
use distgrad::{Cancellation, Code, Error, Message, Responder, Worker, WorkerOptions};
use std::{
    future::{poll_fn, Future as _, IntoFuture},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc, Arc, Mutex,
    },
    task::{Poll, Waker},
    thread,
    time::Duration,
};

/// Registers "wait", which gives back what it got once something is sent.
fn gate(worker: &Worker) -> mpsc::Sender<()> {
    let (open, gate) = mpsc::channel();
    let gate = Mutex::new(gate);
    worker
        .register("wait", move |request| {
            gate.lock().unwrap().recv()?;
            Ok(Message::from_payload(request.payload())?)
        })
        .unwrap();
    open
}

#[test]
fn asynchronous_handlers() {
    // One thread for handlers that wait for each other.
    let worker = alone_with(WorkerOptions::new().thread_count(1));
    let (sender, receiver) = mpsc::channel::<Waker>();
    let (receiver, opened) = (Mutex::new(receiver), Arc::new(AtomicUsize::new(0)));
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
    let open = gate(&worker);
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
    let open = gate(&worker);
    let caller = worker.caller().timeout(Duration::from_millis(20));
    assert_eq!(caller.call("alone", "wait", &empty()).unwrap_err().code(), Code::DeadlineExceeded);
    let future = caller.call_async("alone", "wait", &empty()).unwrap();
    assert_eq!(future.wait().unwrap_err().code(), Code::DeadlineExceeded);
    drop(open);
}

#[test]
fn a_call_is_given_up() {
    let worker = alone();
    let open = gate(&worker);
    let future = worker.call_async("alone", "wait", &empty()).unwrap();
    future.cancel().unwrap();
    assert_eq!(future.wait().unwrap_err().code(), Code::Cancelled);
    future.cancel().unwrap(); // has ended
    open.send(()).unwrap();

    let done = worker.call_async("alone", "wait", &empty()).unwrap();
    open.send(()).unwrap();
    done.wait().unwrap();
    done.cancel().unwrap();
    assert!(done.wait().is_ok());
}

#[test]
fn a_handler_that_waits_lets_others_run() {
    // One thread: the handler that waits has to give it up for the one that it waits for.
    let worker = alone_with(WorkerOptions::new().thread_count(1));
    let (open, gate) = mpsc::channel::<u8>();
    let gate = Mutex::new(gate);
    worker
        .register("wait", move |_| {
            let byte = distgrad::wait(|| gate.lock().unwrap().recv())??;
            Ok(Message::from_payload([byte])?)
        })
        .unwrap();
    worker
        .register("open", move |_| {
            open.send(7)?;
            Ok(empty())
        })
        .unwrap();
    worker.register("panic", |_| distgrad::wait(|| panic!("while it waits"))?).unwrap();

    let future = worker.call_async("alone", "wait", &empty()).unwrap();
    worker.call("alone", "open", &empty()).unwrap();
    assert_eq!(future.wait().unwrap().payload(), [7]);
    let error = worker.call("alone", "panic", &empty()).unwrap_err();
    assert_eq!(error.code(), Code::Internal);
    assert!(error.message().contains("panicked: while it waits"), "{error}");

    assert_eq!(distgrad::wait(|| 8).unwrap(), 8); // on any thread
    let (sender, receiver) = mpsc::channel();
    future.then(move || sender.send(distgrad::wait(|| 9)).unwrap()).unwrap();
    let refused = receiver.recv_timeout(LONG).unwrap().unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
}

#[test]
fn a_handler_sees_that_it_is_given_up() {
    let worker = alone();
    let (tell, told) = mpsc::channel();
    worker
        .register("wait", move |request| {
            request.cancellation().check()?;
            tell.send("begun")?;
            let (wake, woken) = mpsc::channel();
            request.cancellation().on_cancel(move || wake.send(()).unwrap())?;
            let result = distgrad::wait(|| woken.recv_timeout(LONG))?;
            tell.send(if result.is_ok() { "given up" } else { "left alone" })?;
            Err(request.cancellation().check().unwrap_err().into())
        })
        .unwrap();
    let tell = |expected| assert_eq!(told.recv_timeout(LONG).unwrap(), expected);

    let future = worker.call_async("alone", "wait", &empty()).unwrap();
    tell("begun");
    future.cancel().unwrap();
    assert_eq!(future.wait().unwrap_err().code(), Code::Cancelled);
    tell("given up");

    // Two calls that are given up together, and one that is made too late.
    let both = Cancellation::new().unwrap();
    assert_eq!(format!("{both:?}"), "Cancellation(cancelled: false)");
    let caller = worker.caller().cancellation(&both);
    let futures = [0, 1].map(|_| caller.call_async("alone", "wait", &empty()).unwrap());
    tell("begun");
    tell("begun");
    both.cancel().unwrap();
    both.cancel().unwrap();
    for future in futures {
        assert_eq!(future.wait().unwrap_err().code(), Code::Cancelled);
        tell("given up");
    }
    assert_eq!(caller.call("alone", "wait", &empty()).unwrap_err().code(), Code::Cancelled);
    assert_eq!(both.check().unwrap_err().code(), Code::Cancelled);
    let (ran, running) = mpsc::channel();
    both.on_cancel(move || ran.send(()).unwrap()).unwrap(); // is already: at once
    running.try_recv().unwrap();

    // One that is taken off is dropped, and not called.
    let forgetful = Cancellation::new().unwrap();
    let (never, nothing) = mpsc::channel::<()>();
    let id = forgetful.on_cancel(move || never.send(()).unwrap()).unwrap();
    assert_eq!(nothing.try_recv(), Err(mpsc::TryRecvError::Empty));
    forgetful.forget(id).unwrap();
    assert_eq!(nothing.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    forgetful.cancel().unwrap();
    forgetful.forget(id).unwrap();
}

#[test]
fn an_asynchronous_handler_is_dropped_when_it_is_given_up() {
    struct Tell(mpsc::Sender<()>);
    impl Drop for Tell {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    let worker = alone();
    let (dropped, drops) = mpsc::channel();
    let (begun, begins) = mpsc::channel();
    worker
        .register_async("never", async move |_| {
            let _tell = Tell(dropped.clone());
            begun.send(()).unwrap();
            std::future::pending().await
        })
        .unwrap();
    let future = worker.call_async("alone", "never", &empty()).unwrap();
    begins.recv_timeout(LONG).unwrap();
    future.cancel().unwrap();
    drops.recv_timeout(LONG).unwrap();
}

#[test]
fn answers_come_later() {
    let worker = alone_with(WorkerOptions::new().thread_count(1));
    let (hand, handed) = mpsc::channel::<Responder>();
    worker
        .register_responder("later", move |later| {
            assert_ne!(later.request().payload(), b"panic");
            hand.send(later).unwrap();
        })
        .unwrap();
    let call = |payload: &str, x: &distgrad::Tensor| {
        worker.call_async("alone", "later", &Message::new(payload, [x]).unwrap()).unwrap()
    };
    let x = weight(&[1.0, 2.0]);

    // Answered in another order, from another thread; the request is still there.
    let [one, two] = ["one", "two"].map(|payload| call(payload, &x));
    let [first, second] = [(); 2].map(|()| handed.recv_timeout(LONG).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            for later in [second, first] {
                let request = later.request();
                assert_eq!((request.function(), request.from()), ("later", 0));
                let reply = Message::new(request.payload(), [request.tensor(0).unwrap()]);
                later.answer(reply.map_err(Into::into)).unwrap();
            }
        });
    });
    let texts = [one, two].map(|future| future.wait().unwrap().text().unwrap().to_owned());
    assert_eq!(texts, ["one", "two"]);

    // Inside a context.
    let context = worker.context().unwrap();
    let future = context.call_async("alone", "later", &Message::new("", [&x]).unwrap()).unwrap();
    let later = handed.recv_timeout(LONG).unwrap();
    let square = later.request().tensor(0).unwrap().square().unwrap();
    later.answer(Ok(Message::new("", [square]).unwrap())).unwrap();
    let y = future.wait().unwrap().tensor(0).unwrap();
    context.backward([y.sum().unwrap()]).unwrap();
    assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [2.0, 4.0]);

    // An error; none at all; a panic; and too late.
    let future = call("", &x);
    let error = Error::new(Code::OutOfRange, "the end");
    handed.recv_timeout(LONG).unwrap().answer(Err(error.into())).unwrap();
    assert_eq!(future.wait().unwrap_err().code(), Code::OutOfRange);
    let future = call("", &x);
    drop(handed.recv_timeout(LONG).unwrap());
    assert_eq!(future.wait().unwrap_err().code(), Code::Internal);
    assert_eq!(call("panic", &x).wait().unwrap_err().code(), Code::Internal);
    let future = call("", &x);
    let later = handed.recv_timeout(LONG).unwrap();
    future.cancel().unwrap();
    assert_eq!(future.wait().unwrap_err().code(), Code::Cancelled);
    later.answer(Ok(empty())).unwrap();
}
