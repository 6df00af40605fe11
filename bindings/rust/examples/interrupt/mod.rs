//! Ctrl-C, which ends training between two steps.
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

const SIGINT: i32 = 2;
const SIG_DFL: usize = 0;

extern "C" {
    // Of the C library, which Rust's own stands on.
    fn signal(number: i32, handler: usize) -> usize;
}

extern "C" fn remember(number: i32) {
    INTERRUPTED.store(true, Ordering::SeqCst);
    // SAFETY: signal() may be called in a handler.
    unsafe { signal(number, SIG_DFL) };
}

/// Has the first Ctrl-C remembered only; a second one ends the process.
pub fn catch() {
    // SAFETY: the handler writes to an atomic, and calls nothing but signal().
    unsafe { signal(SIGINT, remember as extern "C" fn(i32) as usize) };
}

/// Whether it has come.
pub fn has_come() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}
