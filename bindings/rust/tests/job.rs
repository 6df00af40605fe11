//! How workers join a job, what they know of it, and how they leave it.
mod common;
use common::{alone, alone_with, empty, floats, pair, weight, Folder, LONG};
use distgrad::{values, Code, Error, Message, ServeOperators, Value, WorkerOptions};
use std::{env, fs, process::Command, thread, time::Duration};

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

/// What a launcher says is in the environment, which is a process's own: so this is another one.
#[test]
#[ignore = "is run by the test below"]
fn child_of_a_launcher() {
    // The fourth worker of the launcher's machine, were the job not one of its own.
    let folder = Folder::new();
    let rendezvous = format!("file://{}/workers?world_size=1", folder.0.display());
    let worker = WorkerOptions::new().rendezvous(rendezvous).create().unwrap();
    assert_eq!((worker.rank(), worker.world_size()), (0, 1));
    assert_eq!((worker.local_rank(), worker.local_world_size()), (3, 4));
}

#[test]
fn places_on_a_machine() {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child_of_a_launcher", "--ignored"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "is run by the test below"]
fn child_of_torchrun() {
    let failure = Error::new(Code::DataLoss, "the disk is full");
    distgrad::report_failure(&failure).unwrap();
    distgrad::report_failure(&Error::new(Code::Unavailable, "a consequence")).unwrap();
}

#[test]
fn a_failure_is_reported() {
    distgrad::report_failure(&Error::new(Code::DataLoss, "to nobody")).unwrap();
    let folder = Folder::new();
    let file = folder.0.join("error.json");
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child_of_torchrun", "--ignored"])
        .env("TORCHELASTIC_ERROR_FILE", &file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let report = fs::read_to_string(file).unwrap();
    assert!(report.contains("DATA_LOSS: the disk is full"), "{report}");
}

#[test]
fn jobs_share_a_rendezvous() {
    let folder = Folder::new();
    let options = || folder.options().rank(0, 1);
    let one = options().job("one").name("of one").create().unwrap();
    let two = options().job("two").name("of two").create().unwrap();
    assert_eq!(one.name(0).as_deref(), Some("of one"));
    assert_eq!(two.name(0).as_deref(), Some("of two"));
    assert_eq!(options().job("a/b").create().unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn limits_of_silence() {
    let folder = Folder::new();
    let with =
        |job: &str, limit| folder.options().rank(0, 1).job(job).heartbeat_limit(limit).create();
    let short = with("a", Duration::from_millis(99)).unwrap_err();
    assert_eq!(short.code(), Code::InvalidArgument, "{short}");
    assert!(with("b", Duration::from_millis(100)).is_ok());
    assert!(with("c", Duration::MAX).is_ok());
}

#[test]
fn operators_that_may_be_called() {
    let x = floats(&[2.0]);
    for (operators, code_of_computing, code_of_others) in [
        (ServeOperators::Safe, None, Some(Code::PermissionDenied)),
        (ServeOperators::None, Some(Code::PermissionDenied), Some(Code::PermissionDenied)),
        (ServeOperators::All, None, None),
    ] {
        let worker = alone_with(WorkerOptions::new().serve_operators(operators));
        let code = |op: &str, arguments: &[Value<'_>]| {
            worker.call_op("alone", op, arguments).err().map(|error| error.code())
        };
        assert_eq!(code("aten::square", &values![&x]), code_of_computing, "{operators:?}");
        // An internal step of torch's.
        let others = code("aten::_cast_Int", &values![&x]);
        assert_eq!(others, code_of_others, "{operators:?}");
    }
}

#[test]
fn a_worker_leaves_while_the_job_goes_on() {
    let folder = Folder::new();
    let options = |rank: u32| folder.options().name(format!("worker{rank}")).rank(rank, 3);
    thread::scope(|scope| {
        let leave = |rank, timeout| {
            let worker = options(rank).create()?;
            worker.register("any", |_| Ok(empty()))?;
            worker.barrier(LONG)?; // may be called
            worker.barrier(LONG)?; // was called
            let left = worker.leave(timeout);
            assert_eq!(worker.rank(), rank); // it is there, whatever came of that
            left
        };
        let idle = scope.spawn(move || leave(1, LONG));
        let busy = scope.spawn(move || leave(2, Duration::from_millis(20)));
        let worker = options(0).create().unwrap();
        worker.barrier(LONG).unwrap();
        let context = worker.context().unwrap();
        context.call("worker2", "any", &empty()).unwrap();
        worker.barrier(LONG).unwrap();
        idle.join().unwrap().unwrap();
        // It takes part in a context that does not end.
        assert_eq!(busy.join().unwrap().unwrap_err().code(), Code::DeadlineExceeded);
        for gone in ["worker1", "worker2"] {
            let error = worker.call(gone, "any", &empty()).unwrap_err();
            assert_eq!(error.code(), Code::Unavailable, "{error}");
        }
        drop(context);
        worker.leave(LONG).unwrap();
    });
}

#[test]
fn one_message_to_several_workers() {
    pair(
        |back| {
            back.register("echo", |request| {
                Ok(Message::new(format!("{}!", request.text()?), [request.tensor(0)?.square()?])?)
            })
            .unwrap();
        },
        |front| {
            front.register("echo", |_| Err("not me".into())).unwrap();
            let x = weight(&[3.0]);
            let context = front.context().unwrap();
            let message = Message::new("hello", [&x]).unwrap();
            let to = ["back", "front", "nobody", "back"];
            let mut replies = context.call_each(&to, "echo", &message).unwrap();
            let last = replies.pop().unwrap().unwrap();
            assert_eq!(replies.len(), 3);
            assert_eq!(replies[1].as_ref().unwrap_err().code(), Code::Unknown);
            assert!(replies[1].as_ref().unwrap_err().message().contains("not me"));
            assert_eq!(replies[2].as_ref().unwrap_err().code(), Code::NotFound);
            let first = replies.swap_remove(0).unwrap();
            assert_eq!((first.text().unwrap(), last.text().unwrap()), ("hello!", "hello!"));
            // Each has an edge of its own.
            let sum = first.tensor(0).unwrap().add(&last.tensor(0).unwrap()).unwrap();
            context.backward([sum.sum().unwrap()]).unwrap();
            assert_eq!(context.gradient(&x).unwrap().to_vec::<f32>().unwrap(), [12.0]);
            assert!(front.call_each(&[], "echo", &message).unwrap().is_empty());
        },
    );
}

#[test]
fn a_trace() {
    let worker = alone();
    worker.register("traced", |_| Ok(empty())).unwrap();
    let call = || worker.call("alone", "traced", &empty()).unwrap();
    assert_eq!(worker.stop_trace().unwrap_err().code(), Code::FailedPrecondition);
    call();
    worker.start_trace(None).unwrap();
    assert_eq!(worker.start_trace(None).unwrap_err().code(), Code::FailedPrecondition);
    call();
    let text = worker.stop_trace().unwrap();
    let count = |part: &str| text.matches(part).count();
    // The call at both ends, with an arrow from one to the other.
    assert_eq!(count(r#""name":"traced""#), 2, "{text}");
    assert_eq!((count(r#""ph":"s""#), count(r#""ph":"f""#)), (1, 1), "{text}");
    assert_eq!(count(r#""dropped_spans":0"#), 1, "{text}");
    // Too small for anything.
    worker.start_trace(std::num::NonZeroU64::new(1)).unwrap();
    call();
    let text = worker.stop_trace().unwrap();
    assert!(text.contains(r#""dropped_spans":2"#), "{text}");
}

#[test]
fn metrics() {
    let worker = alone();
    worker.register("counted", |_| Ok(empty())).unwrap();
    for _ in 0..3 {
        worker.call("alone", "counted", &empty()).unwrap();
    }
    let text = worker.metrics_text().unwrap();
    let made = text.lines().find(|line| {
        line.starts_with("distgrad_calls_total{")
            && line.contains("function=\"counted\"")
            && line.contains("side=\"client\"")
    });
    assert!(made.is_some_and(|line| line.ends_with(" 3")), "{text}");
}
