//! See Cargo.toml.
#![cfg(test)]

mod sync {
    pub(crate) use loom::sync::{Arc, Mutex};
}

#[path = "../../src/waker_slot.rs"]
mod waker_slot;

use loom::{
    sync::{atomic::AtomicBool, Arc, Mutex},
    thread,
};
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    task::{Poll, Wake, Waker},
};
use waker_slot::{AtEnd, WakerSlot};

/// What the library keeps of a future (core/base/future.h): it is done before it calls anybody, and
/// calls once; what comes when it is done is called at once. Ended by the answer or by a cancel,
/// whichever comes first.
#[derive(Default)]
struct Work {
    done: AtomicBool,
    callback: Mutex<Option<AtEnd>>,
}

impl Work {
    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
    fn then(&self, end: AtEnd) -> Result<(), ()> {
        let mut callback = self.callback.lock().unwrap();
        if self.is_done() {
            drop(callback);
            end.wake();
        } else {
            assert!(callback.replace(end).is_none(), "it is asked for once");
        }
        Ok(())
    }
    fn end(&self) {
        let mut callback = self.callback.lock().unwrap();
        let first = !self.done.swap(true, Ordering::AcqRel);
        let end = callback.take();
        drop(callback);
        assert!(first || end.is_none());
        if let Some(end) = end {
            end.wake();
        }
    }
    fn poll(&self, slot: &WakerSlot, waker: &Waker) -> bool {
        match slot.poll(waker, || self.is_done(), |end| self.then(end)) {
            Poll::Ready(result) => result.is_ok(),
            Poll::Pending => false,
        }
    }
}

fn end_on_a_thread(work: &Arc<Work>) -> thread::JoinHandle<()> {
    let work = Arc::clone(work);
    thread::spawn(move || work.end())
}

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Polls with a waker of its own until the thread that ends it has been joined; whoever was told to
/// wait must have been woken by then.
#[test]
fn whoever_is_told_to_wait_is_woken() {
    loom::model(|| {
        let work = Arc::new(Work::default());
        let ender = end_on_a_thread(&work);
        let (slot, count) = (WakerSlot::new(), std::sync::Arc::new(Count::default()));
        let ready = work.poll(&slot, &Waker::from(std::sync::Arc::clone(&count)));
        ender.join().unwrap();
        let woken = count.0.load(Ordering::Relaxed);
        assert!(ready || woken == 1, "ready: {ready}, woken: {woken}");
        assert!(work.poll(&slot, Waker::noop()));
    });
}

/// A task that moves to another executor is woken there.
#[test]
fn the_last_one_that_waits_is_woken() {
    loom::model(|| {
        let work = Arc::new(Work::default());
        let ender = end_on_a_thread(&work);
        let slot = WakerSlot::new();
        let last = std::sync::Arc::new(Count::default());
        let mut ready = work.poll(&slot, Waker::noop());
        ready = ready || work.poll(&slot, &Waker::from(std::sync::Arc::clone(&last)));
        ender.join().unwrap();
        assert!(ready || last.0.load(Ordering::Relaxed) == 1);
    });
}

/// The answer and a cancel come at once: one of them wakes, once.
#[test]
fn the_answer_and_a_cancel_wake_once() {
    loom::model(|| {
        let work = Arc::new(Work::default());
        let enders = [(); 2].map(|()| end_on_a_thread(&work));
        let (slot, count) = (WakerSlot::new(), std::sync::Arc::new(Count::default()));
        let ready = work.poll(&slot, &Waker::from(std::sync::Arc::clone(&count)));
        for ender in enders {
            ender.join().unwrap();
        }
        let woken = count.0.load(Ordering::Relaxed);
        assert!(woken <= 1 && (ready || woken == 1), "ready: {ready}, woken: {woken}");
    });
}

/// It is dropped while it ends: nothing hangs, and the waker is dropped as well.
#[test]
fn what_is_dropped_keeps_no_waker() {
    loom::model(|| {
        let work = Arc::new(Work::default());
        let ender = end_on_a_thread(&work);
        let (slot, count) = (WakerSlot::new(), std::sync::Arc::new(Count::default()));
        work.poll(&slot, &Waker::from(std::sync::Arc::clone(&count)));
        drop(slot);
        ender.join().unwrap();
        assert_eq!(std::sync::Arc::strong_count(&count), 1);
    });
}

/// An executor as it is: sleeps until it is woken. loom finds whoever sleeps for ever.
#[test]
fn an_executor_comes_to_the_end() {
    loom::model(|| {
        let work = Arc::new(Work::default());
        let ender = end_on_a_thread(&work);
        let slot = WakerSlot::new();
        let end = std::future::poll_fn(|context| {
            slot.poll(context.waker(), || work.is_done(), |end| work.then(end))
        });
        loom::future::block_on(end).unwrap();
        ender.join().unwrap();
    });
}
