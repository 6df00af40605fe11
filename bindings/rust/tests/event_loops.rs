//! Futures and served calls on other people's executors: tokio, with one thread and with several, and
//! smol.
mod common;
use common::{alone, alone_with, empty, weight, Folder, LONG};
use distgrad::{Code, Context, Message, Optimizer, Sgd, Tensor, Worker, WorkerOptions};
use std::{
    future::Future,
    pin::Pin,
    sync::{mpsc, Arc},
    time::Duration,
};

type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An executor, as far as these tests know it.
trait Executor: Sync {
    /// Runs a future on this thread.
    fn run(&self, future: Boxed);
    /// Starts a task, and returns what ends it early.
    fn start(&self, future: Boxed) -> Box<dyn FnOnce()>;
    /// Runs a future for so long at most; `None` if it was not done by then, and so was dropped.
    fn limit<'a>(
        &self,
        time: Duration,
        future: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
    ) -> Pin<Box<dyn Future<Output = Option<()>> + Send + 'a>>;
}

struct Tokio(tokio::runtime::Handle);

impl Executor for Tokio {
    fn run(&self, future: Boxed) {
        self.0.block_on(future)
    }
    fn start(&self, future: Boxed) -> Box<dyn FnOnce()> {
        let task = self.0.spawn(future);
        Box::new(move || task.abort())
    }
    fn limit<'a>(
        &self,
        time: Duration,
        future: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
    ) -> Pin<Box<dyn Future<Output = Option<()>> + Send + 'a>> {
        Box::pin(async move { tokio::time::timeout(time, future).await.ok() })
    }
}

struct Smol;

impl Executor for Smol {
    fn run(&self, future: Boxed) {
        smol::block_on(future)
    }
    fn start(&self, future: Boxed) -> Box<dyn FnOnce()> {
        let task = smol::spawn(future);
        Box::new(move || drop(task))
    }
    fn limit<'a>(
        &self,
        time: Duration,
        future: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
    ) -> Pin<Box<dyn Future<Output = Option<()>> + Send + 'a>> {
        let timer = async move {
            smol::Timer::after(time).await;
        };
        let in_time = async {
            future.await;
            Some(())
        };
        let too_late = async {
            timer.await;
            None
        };
        Box::pin(smol::future::or(in_time, too_late))
    }
}

fn on_each(test: impl Fn(&dyn Executor)) {
    let several =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
    let several = several.unwrap();
    test(&Tokio(several.handle().clone()));
    let one = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let handle = one.handle().clone();
    let (end, ended) = smol::channel::bounded::<()>(1);
    let thread = std::thread::spawn(move || one.block_on(ended.recv()).unwrap_err());
    test(&Tokio(handle));
    drop(end);
    thread.join().unwrap();
    test(&Smol);
}

/// Registers "wait", which says that it has begun, and then what ended it.
fn told_of_waits(worker: &Worker) -> mpsc::Receiver<&'static str> {
    let (tell, told) = mpsc::channel();
    worker
        .register("wait", move |request| {
            let (wake, woken) = mpsc::channel();
            request.cancellation().on_cancel(move || wake.send(()).unwrap())?;
            tell.send("begun")?;
            let result = distgrad::wait(|| woken.recv_timeout(LONG))?;
            tell.send(if result.is_ok() { "given up" } else { "left alone" })?;
            Err(request.cancellation().check().unwrap_err().into())
        })
        .unwrap();
    told
}

#[test]
fn calls_and_backward_are_awaited() {
    on_each(|executor| {
        let worker = Arc::new(alone_with(WorkerOptions::new().thread_count(1)));
        worker
            .register("square", |request| Ok(Message::new("", [request.tensor(0)?.square()?])?))
            .unwrap();
        executor.run(Box::pin(async move {
            let x = weight(&[1.0, 2.0]);
            let context = worker.shared_context().unwrap();
            let message = Message::new("", [&x]).unwrap();
            // Two at once, awaited in the other order.
            let first = context.call_async("alone", "square", &message).unwrap();
            let second = context.call_async("alone", "square", &message).unwrap();
            let second = second.await.unwrap().tensor(0).unwrap();
            let first = first.await.unwrap().tensor(0).unwrap();
            let loss = first.add(&second).unwrap().sum().unwrap();
            context.backward_async([loss], &Default::default()).unwrap().await.unwrap();
            assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [4.0, 8.0]);
            let error = worker.call_async("alone", "absent", &empty()).unwrap().await.unwrap_err();
            assert_eq!(error.code(), Code::NotFound);
        }));
    });
}

#[test]
fn a_task_that_is_dropped_cancels_what_it_awaits() {
    on_each(|executor| {
        let worker = Arc::new(alone());
        let told = told_of_waits(&worker);
        let tell = |expected| assert_eq!(told.recv_timeout(LONG).unwrap(), expected);
        let caller = Arc::clone(&worker);
        let end = executor.start(Box::pin(async move {
            let _ = caller.call_async("alone", "wait", &empty()).unwrap().await;
            panic!("dropped before");
        }));
        tell("begun");
        end();
        tell("given up");

        // By a timeout of the executor's. The time is over at some moment of the call, so that what
        // is certain is only how it ends.
        let caller = Arc::clone(&worker);
        let limited = executor.limit(
            Duration::from_millis(20),
            Box::pin(async move {
                let _ = caller.call_async("alone", "wait", &empty()).unwrap().await;
                panic!("dropped before");
            }),
        );
        executor.run(Box::pin(async move { assert!(limited.await.is_none()) }));
        while let Ok(begun) = told.recv_timeout(Duration::ZERO) {
            if begun == "begun" {
                tell("given up");
            }
        }
        worker.close(LONG).unwrap(); // no handler waits for anything
    });
}

#[test]
fn what_is_not_awaited_goes_on() {
    let worker = alone();
    let told = told_of_waits(&worker);
    let future = worker.call_async("alone", "wait", &empty()).unwrap();
    assert_eq!(told.recv_timeout(LONG).unwrap(), "begun");
    let (tell, ended) = mpsc::channel();
    future.then(move || tell.send(()).unwrap()).unwrap();
    drop(future);
    assert_eq!(ended.recv_timeout(Duration::from_millis(20)), Err(mpsc::RecvTimeoutError::Timeout));
    drop(worker);
    assert_eq!(told.recv_timeout(LONG).unwrap(), "given up");
}

#[test]
fn calls_are_served_by_a_task() {
    on_each(|executor| {
        let worker = alone_with(WorkerOptions::new().thread_count(1));
        let mut calls = worker.calls("double").unwrap();
        assert_eq!(worker.calls("double").unwrap_err().code(), Code::AlreadyExists);
        let (tell, told) = mpsc::channel();
        let _task = executor.start(Box::pin(async move {
            let mut served = 0;
            while let Some(call) = calls.next().await {
                let x = call.request().tensor(0).unwrap();
                let reply = Message::new(call.request().payload(), [x.add(&x).unwrap()]);
                call.answer(reply.map_err(Into::into)).unwrap();
                served += 1;
            }
            tell.send(served).unwrap(); // the worker has ended
        }));
        let x = Tensor::from_slice(&[1.5f32], &[1]).unwrap();
        let futures: Vec<_> = (0..50)
            .map(|i| {
                let message = Message::new(i.to_string(), [&x]).unwrap();
                worker.call_async("alone", "double", &message).unwrap()
            })
            .collect();
        for (i, future) in futures.into_iter().enumerate() {
            let reply = future.wait().unwrap();
            assert_eq!(reply.text().unwrap(), i.to_string());
            assert_eq!(reply.tensor(0).unwrap().to_vec::<f32>().unwrap(), [3.0]);
        }
        drop(worker);
        assert_eq!(told.recv_timeout(LONG).unwrap(), 50);
    });
}

#[test]
fn a_task_that_serves_ends_with_its_worker() {
    on_each(|executor| {
        let folder = Folder::new();
        let worker = folder.options().name("alone").rank(0, 1).create().unwrap();
        let mut calls = worker.calls("ask").unwrap();
        worker.register("answer", |_| Ok(empty())).unwrap();
        let (tell, told) = mpsc::channel();
        let _task = executor.start(Box::pin(async move {
            while let Some(call) = calls.next().await {
                // Without the worker, which this would keep.
                let asked = call.request().call_async("alone", "answer", &empty()).unwrap();
                call.answer(asked.await.map_err(Into::into)).unwrap();
            }
            tell.send(()).unwrap();
        }));
        worker.call("alone", "ask", &empty()).unwrap();
        worker.shutdown(LONG).unwrap();
        assert_eq!(told.try_recv(), Err(mpsc::TryRecvError::Empty)); // it is there yet
        worker.close(LONG).unwrap();
        told.recv_timeout(LONG).unwrap();
    });
}

// On the worker's threads there is no runtime of tokio's, which its timers ask for.
#[test]
fn a_handler_enters_its_runtime() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build();
    let runtime = runtime.unwrap();
    let worker = alone();
    let handle = runtime.handle().clone();
    worker
        .register_async("sleep", async move |_| {
            let _entered = handle.enter();
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok(empty())
        })
        .unwrap();
    worker
        .register_async("outside", async |_| {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok(empty())
        })
        .unwrap();
    worker.call("alone", "sleep", &empty()).unwrap();
    let error = worker.call("alone", "outside", &empty()).unwrap_err();
    assert_eq!(error.code(), Code::Internal, "{error}");
}

#[test]
fn calls_that_nobody_takes_fail() {
    let worker = alone();
    let calls = worker.calls("work").unwrap();
    let waiting = worker.call_async("alone", "work", &empty()).unwrap();
    while format!("{calls:?}") != "Calls(1 waiting)" {
        std::thread::yield_now();
    }
    drop(calls);
    for future in [waiting, worker.call_async("alone", "work", &empty()).unwrap()] {
        let error = future.wait().unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert!(error.message().contains("nobody takes the calls of 'work'"), "{error}");
    }
}

/// All that a training has, in one struct, which may move to another thread.
struct Trainer {
    step: Context<'static>,
    optimizer: Optimizer<'static>,
    weight: Tensor,
    worker: Arc<Worker>,
}

impl Trainer {
    fn new(worker: Worker) -> distgrad::Result<Self> {
        let worker = Arc::new(worker);
        let weight = weight(&[1.0, 2.0]);
        Ok(Self {
            step: worker.shared_context()?,
            optimizer: Sgd::new(0.5).create_shared(&worker, "", [&weight])?,
            weight,
            worker,
        })
    }

    fn train(&mut self) -> distgrad::Result<()> {
        self.step = self.worker.shared_context()?;
        let message = Message::new("", [&self.weight])?;
        let y = self.step.call("alone", "square", &message)?.tensor(0)?;
        self.step.backward([y.sum()?])?;
        self.optimizer.step(&self.step)
    }
}

#[test]
fn a_struct_has_its_worker_and_what_works_with_it() {
    let worker = alone();
    worker
        .register("square", |request| Ok(Message::new("", [request.tensor(0)?.square()?])?))
        .unwrap();
    let mut trainer = Trainer::new(worker).unwrap();
    trainer.train().unwrap();
    let mut trainer = std::thread::spawn(move || {
        trainer.train().unwrap();
        trainer
    })
    .join()
    .unwrap();
    trainer.train().unwrap();
    assert_eq!(trainer.weight.to_vec::<f32>().unwrap(), [0.0, 0.0]);

    // The worker lives as long as what works with it.
    let Trainer { step, optimizer, weight, worker } = trainer;
    let alive = Arc::downgrade(&worker);
    drop(worker);
    step.call("alone", "square", &Message::new("", [&weight]).unwrap()).unwrap();
    drop(step);
    optimizer.set_learning_rate(0.1).unwrap();
    assert!(alive.upgrade().is_some());
    let adam = distgrad::Adam::new(0.1);
    let other = adam.create_shared(&alive.upgrade().unwrap(), "other", [&weight]).unwrap();
    drop(optimizer);
    assert!(alive.upgrade().is_some());
    drop(other);
    assert!(alive.upgrade().is_none());
}
