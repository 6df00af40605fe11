//! Workers that join a running job, leave it and come back; limits and device pairs; what a worker
//! holds of its contexts.
mod common;
use common::{alone_with, empty, pair, weight, Folder, LONG};
use distgrad::{
    values, Code, Limits, MemberEventKind, Message, OnLost, Tensor, TlsOptions, Worker,
    WorkerOptions,
};
use std::{sync::mpsc, thread};

fn known(worker: &Worker) -> Vec<(String, u32)> {
    worker.members().unwrap().into_iter().map(|member| (member.name, member.rank)).collect()
}

#[test]
fn a_worker_joins_leaves_and_comes_back() {
    let folder = Folder::new();
    let late = || folder.options().name("late").join(true).create().unwrap();
    let first = folder.options().name("first").rank(0, 1).create().unwrap();
    first.register("echo", |request| Ok(Message::from_payload(request.payload())?)).unwrap();
    assert_eq!(known(&first), [("first".to_owned(), 0)]);

    let both = [("first".to_owned(), 0), ("late".to_owned(), 1)];
    let worker = late();
    assert_eq!((worker.rank(), worker.world_size()), (1, 2));
    assert_eq!(known(&worker), both);
    worker.call("first", "echo", &empty()).unwrap();
    first.update_members().unwrap();
    assert_eq!(known(&first), both);
    let before = first.members().unwrap();

    let third = folder.options().name("third").join(true).max_workers(2).create().unwrap_err();
    assert_eq!(third.code(), Code::ResourceExhausted, "{third}");

    worker.leave(None).unwrap();
    drop(worker);
    first.update_members().unwrap();
    assert_eq!(known(&first), both[..1]);
    assert_eq!((first.world_size(), first.name(1)), (1, None));
    let worker = late();
    first.update_members().unwrap();
    let after = first.members().unwrap();
    assert_eq!(known(&first), both);
    assert_eq!(after[0], before[0]);
    assert!(after[1].incarnation > before[1].incarnation);
    drop(worker);
}

#[test]
fn a_callback_hears_of_members() {
    let folder = Folder::new();
    let late = || folder.options().name("late").join(true).create().unwrap();
    let first = folder.options().name("first").rank(0, 1).create().unwrap();
    let (sender, receiver) = mpsc::channel();
    first.on_member(move |event| sender.send(event).unwrap()).unwrap();
    let next = |kind| {
        let event = receiver.recv().unwrap();
        assert_eq!((&event.member.name[..], event.member.rank, event.kind), ("late", 1, kind));
        assert_eq!(event.reason.is_empty(), kind != MemberEventKind::Lost, "{event:?}");
        event.member.incarnation
    };
    let worker = late();
    let incarnation = next(MemberEventKind::Joined);
    worker.leave(LONG).unwrap();
    drop(worker);
    assert_eq!(next(MemberEventKind::Left), incarnation);
    let worker = late();
    assert!(next(MemberEventKind::Joined) > incarnation);
    drop(worker);
    next(MemberEventKind::Lost);
    // Taken off, it is dropped, and so is what it holds.
    first.remove_on_member().unwrap();
    assert!(receiver.recv().is_err());
    first.on_member(|_| panic!("is printed, and nothing else")).unwrap();
    late().leave(LONG).unwrap();
}

#[test]
fn a_worker_serves_until_the_job_ends() {
    let folder = Folder::new();
    let late = || folder.options().name("late").join(true).create().unwrap();
    let first = folder.options().name("first").rank(0, 1).create().unwrap();
    first.register("echo", |request| Ok(Message::from_payload(request.payload())?)).unwrap();
    thread::scope(|scope| {
        let worker = late();
        let serving = scope.spawn(|| first.serve());
        drop(worker); // without a word
        let error = serving.join().unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert!(error.message().contains("'late' (1) is lost"), "{error}");
        first.barrier_with(None, OnLost::GoOnWithout).unwrap();

        let worker = late();
        let serving = scope.spawn(|| first.serve_with(OnLost::GoOnWithout));
        worker.call("first", "echo", &empty()).unwrap();
        worker.shutdown(None).unwrap();
        serving.join().unwrap().unwrap();
    });
    first.shutdown_with(LONG, OnLost::Fail).unwrap(); // it is over
}

#[test]
fn limits_are_named() {
    let limits = Limits::new().message_bytes(1000).tensors_per_message(1);
    let worker = alone_with(WorkerOptions::new().limits(limits));
    worker.register("echo", |request| Ok(Message::from_payload(request.payload())?)).unwrap();
    let call = |message: Message| worker.call("alone", "echo", &message).unwrap_err();
    let long = call(Message::from_payload([0; 2000]).unwrap());
    let two = call(Message::with_gaps("", &[None, None]).unwrap());
    for (error, limit) in [(long, "message_bytes"), (two, "tensors_per_message")] {
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
        assert!(error.message().contains(limit), "{error}");
    }
    worker.call("alone", "echo", &empty()).unwrap();
}

#[test]
fn certificates_that_cannot_be_used_are_named() {
    let folder = Folder::new();
    let said = |tls: TlsOptions| {
        let error = folder.options().rank(0, 1).tls(tls).create().unwrap_err();
        (error.code(), error.message().to_owned())
    };
    let nowhere = folder.0.join("nowhere.pem");
    for (tls, words) in [
        (TlsOptions::new().cert(&nowhere), ["tls.key is not", "DISTGRAD_TLS_KEY"]),
        (TlsOptions::new().key(&nowhere), ["tls.cert is not", "DISTGRAD_TLS_CERT"]),
        (TlsOptions::new().cert(&nowhere).key(&nowhere), ["tls.ca", "DISTGRAD_TLS_CA"]),
        (TlsOptions::new().ca(&nowhere), ["tls.cert", "DISTGRAD_TLS_CERT"]),
        (TlsOptions::new().name("a job"), ["tls.cert", "DISTGRAD_TLS_CERT"]),
        (
            TlsOptions::new().cert(&nowhere).key(&nowhere).ca(&nowhere),
            ["nowhere.pem", "tls.cert, or DISTGRAD_TLS_CERT"],
        ),
    ] {
        let (code, message) = said(tls);
        assert_eq!(code, Code::InvalidArgument, "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
    let (code, message) = said(TlsOptions::new().encrypt_local(true)); // by what?
    assert_eq!(code, Code::FailedPrecondition, "{message}");
    let plain = TlsOptions::new().encrypt_local(true).encrypt_local(false);
    folder.options().rank(0, 1).tls(plain).create().unwrap();
}

// Another file than the named one would be taken for the secret, or the authority.
#[test]
#[cfg(unix)]
fn paths_are_taken_as_they_are_or_not_at_all() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let folder = Folder::new();
    let odd = folder.0.join(OsStr::from_bytes(b"odd\xff"));
    let taken = folder.0.join("odd\u{fffd}"); // what it would be if it were taken for text
    std::fs::write(&taken, "a secret of more than sixteen bytes").unwrap();
    let options = || folder.options().rank(0, 1);
    let tls = |tls: TlsOptions| options().tls(tls);
    for options in [
        options().key_file(&odd),
        tls(TlsOptions::new().cert(&odd).key(&taken).ca(&taken)),
        tls(TlsOptions::new().cert(&taken).key(&odd).ca(&taken)),
        tls(TlsOptions::new().cert(&taken).key(&taken).ca(&odd)),
    ] {
        let error = options.create().unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains("is not UTF-8"), "{error}");
    }
    options().key_file(&taken).create().unwrap();
}

#[test]
fn device_pairs() {
    let folder = Folder::new();
    let with = |job: &str, theirs: &str| {
        let options = folder.options().rank(0, 1).job(job).device_pair("peer", "cuda:0", "cuda:1");
        options.device_pair("peer", "cuda:1", theirs).create()
    };
    with("a", "cuda:0").unwrap(); // of a peer that may come yet
    folder.options().rank(0, 1).job("without").gpu_channel(false).create().unwrap();
    for (job, theirs, text) in
        [("b", "cuda:1", "one to one"), ("c", "cpu", "with the CPU"), ("d", "abacus", "abacus")]
    {
        let error = with(job, theirs).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(text), "{error}");
    }
}

#[test]
fn what_a_worker_holds_of_a_context() {
    pair(
        |_| (),
        |front| {
            assert_eq!(front.contexts().unwrap(), []);
            let x = weight(&[2.0]);
            let context = front.context().unwrap();
            let y = context.call_op("back", "aten::exp", &values![&x]).unwrap().remove(0);
            let states = front.contexts().unwrap();
            let [state] = &states[..] else { panic!("{states:?}") };
            assert_eq!((state.id, state.sends, state.receives), (context.id(), 1, 1));
            assert_eq!((&state.peers[..], state.gradients), (&[1][..], 0));
            assert!(state.passes.is_empty());
            context.backward([Tensor::try_from(y).unwrap()]).unwrap();
            assert_eq!(front.contexts().unwrap()[0].gradients, 1);
            drop(context);
            assert_eq!(front.contexts().unwrap(), []);
        },
    );
}
