//! A job of several workers in one process: one thread for each.
#![allow(dead_code)] // each test uses a part of it
use distgrad::{Message, Tensor, Worker, WorkerOptions};
use std::{
    env, fs,
    future::{Future, IntoFuture},
    path::PathBuf,
    process,
    sync::{
        atomic::{AtomicU32, Ordering},
        Arc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};

/// Long enough for anything here; a test that gets there has failed.
pub const LONG: Duration = Duration::from_secs(60);

pub fn floats(data: &[f32]) -> Tensor {
    Tensor::from_slice(data, &[data.len() as i64]).unwrap()
}
pub fn weight(data: &[f32]) -> Tensor {
    floats(data).require_grad().unwrap()
}
pub fn empty() -> Message {
    Message::from_payload("").unwrap()
}

/// Runs a future on this thread.
pub fn block_on<T>(future: impl IntoFuture<Output = T>) -> T {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = Box::pin(future.into_future());
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::park(),
        }
    }
}

/// A folder of the test's own, which ends with it.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let parent = env::var_os("TEST_TMPDIR").map_or_else(env::temp_dir, PathBuf::from);
        let name = format!("rust-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = parent.join(name);
        fs::create_dir_all(&folder).expect("a folder");
        Self(folder)
    }

    pub fn options(&self) -> WorkerOptions {
        WorkerOptions::new().rendezvous(format!("file://{}/workers", self.0.display()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A job of this process alone: a worker called "alone".
pub fn alone() -> Worker {
    alone_with(WorkerOptions::new())
}
pub fn alone_with(options: WorkerOptions) -> Worker {
    let folder = Folder::new();
    let rendezvous = format!("file://{}/workers", folder.0.display());
    options.name("alone").rank(0, 1).rendezvous(rendezvous).create().expect("a worker")
}

/// Runs `front` with worker 0, after `back` has prepared worker 1; they are called "front" and
/// "back", and leave together.
pub fn pair(back: impl FnOnce(&Worker) + Send, front: impl FnOnce(&Worker)) {
    let folder = Folder::new();
    let options = folder.options();
    thread::scope(|scope| {
        let other = options.clone().name("back").rank(1, 2);
        scope.spawn(move || {
            let worker = other.create().expect("the back worker");
            back(&worker);
            worker.barrier(LONG).unwrap();
            worker.shutdown(LONG).unwrap();
        });
        let worker = options.name("front").rank(0, 2).create().expect("the front worker");
        worker.barrier(LONG).unwrap();
        front(&worker);
        worker.shutdown(LONG).unwrap();
    });
}
