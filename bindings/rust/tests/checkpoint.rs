//! Files of tensors, and checkpoints of a job: what is saved, loaded, refused and dropped.
mod common;
use common::{alone, floats, pair, weight, Folder, LONG};
use distgrad::{
    load_checkpoint, load_safetensors, load_safetensors_into, save_safetensors, Adam,
    CheckpointContents, CheckpointManager, CheckpointManagerOptions, CheckpointPart,
    CheckpointValues, Code, Dtype, Error, LoadOptions, Message, Optimizer, OriginKind,
    SafetensorsFile, Sgd, Tensor, Worker,
};
use std::{
    fs,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc, Arc, Mutex,
    },
};

const NO_METADATA: [(&str, &str); 0] = [];

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}

#[test]
fn what_may_cross_threads() {
    fn check<T: Send + Sync>() {}
    check::<SafetensorsFile>();
    check::<CheckpointPart>();
    check::<CheckpointManager>();
}

#[test]
fn files_of_tensors() {
    let folder = Folder::new();
    let path = folder.0.join("some.safetensors");
    let (a, b) = (floats(&[1.0, 2.0]), Tensor::from_slice(&[7i64], &[1, 1]).unwrap());
    save_safetensors(&path, [("a", &a), ("b", &b)], [("made by", "Rust")]).unwrap();
    let loaded = load_safetensors(&path).unwrap();
    assert_eq!(numbers(&loaded["a"]), [1.0, 2.0]);
    assert_eq!(loaded["b"].item::<i64>().unwrap(), 7);

    let file = SafetensorsFile::open(&path).unwrap();
    let tensors = file.tensors().unwrap();
    assert_eq!(tensors["b"].dtype, Dtype::INT64);
    assert_eq!((tensors["b"].shape.as_slice(), tensors["b"].bytes), (&[1, 1][..], 8));
    assert_eq!(file.metadata().unwrap()["made by"], "Rust");
    let to = floats(&[0.0, 0.0]);
    file.read_into("a", &to).unwrap();
    assert_eq!(numbers(&to), numbers(&file.read("a").unwrap()));
    assert_eq!(file.read("c").unwrap_err().code(), Code::NotFound);
    assert!(file.read_into("b", &to).unwrap_err().message().contains("dtype"));
    assert!(format!("{file:?}").contains("SafetensorsFile"));

    let zeros = [("a", floats(&[0.0, 0.0])), ("b", Tensor::from_slice(&[0i64], &[1, 1]).unwrap())];
    load_safetensors_into(&path, zeros.iter().map(|(name, tensor)| (name, tensor))).unwrap();
    assert_eq!(numbers(&zeros[0].1), [1.0, 2.0]);
    let error = load_safetensors_into(&path, [("a", &a), ("c", &b)]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("missing") && error.message().contains("unexpected"));
    let twice = save_safetensors(&path, [("a", &a), ("a", &a)], NO_METADATA).unwrap_err();
    assert!(twice.message().contains("twice"), "{twice}");

    // From anybody.
    for bytes in [&b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"[..], b"no", b"\x02\0\0\0\0\0\0\0no"] {
        fs::write(&path, bytes).unwrap();
        assert_eq!(load_safetensors(&path).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(SafetensorsFile::open(&path).unwrap_err().code(), Code::InvalidArgument);
    }
    assert_eq!(load_safetensors(folder.0.join("none")).unwrap_err().code(), Code::NotFound);
    let nowhere = folder.0.join("no").join("folder");
    assert_eq!(
        save_safetensors(nowhere, [("a", &a)], NO_METADATA).unwrap_err().code(),
        Code::NotFound
    );
}

/// A step from the gradients of the sum of squares.
fn step(worker: &Worker, parameter: &Tensor, optimizer: &Optimizer<'_>) {
    let context = worker.context().unwrap();
    context.backward([parameter.square().unwrap().sum().unwrap()]).unwrap();
    optimizer.step(&context).unwrap();
}

#[test]
fn an_optimizer_in_a_file() {
    let (folder, worker, x) = (Folder::new(), alone(), weight(&[1.0, 2.0]));
    let path = folder.0.join("adam.safetensors");
    let optimizer = Adam::new(0.1).create(&worker, "", [&x]).unwrap();
    step(&worker, &x, &optimizer);
    let (y, other) = (weight(&numbers(&x)), Adam::new(7.0));
    optimizer.save([("x", &x)], &path).unwrap();
    step(&worker, &x, &optimizer);
    optimizer.remove().unwrap();

    let other = other.create(&worker, "other", [&y]).unwrap();
    let error = other.load(&path, [("y", &y)]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    other.load(&path, [("x", &y)]).unwrap();
    step(&worker, &y, &other);
    assert_eq!(numbers(&x), numbers(&y));
    assert_eq!(optimizer.save([("x", &x)], &path).unwrap_err().code(), Code::NotFound);
    let unnamed: [(&str, &Tensor); 0] = [];
    assert_eq!(other.save(unnamed, &path).unwrap_err().code(), Code::InvalidArgument);
}

/// Both workers have a part called "job", with a weight each; the front one steps both.
fn train(worker: &Worker, weight: &Tensor, optimizer: &Optimizer<'_>, position: &AtomicUsize) {
    let x = position.fetch_add(1, Ordering::Relaxed) as f32;
    let context = worker.context().unwrap();
    let hidden = floats(&[0.5 + x, -1.0]).mul(weight).unwrap();
    let reply = context.call("back", "scale", &Message::new("", [hidden]).unwrap()).unwrap();
    context.backward([reply.tensor(0).unwrap().square().unwrap().sum().unwrap()]).unwrap();
    optimizer.step(&context).unwrap();
}

#[test]
fn a_job_goes_on_where_it_was() {
    let folder = Folder::new();
    let path = folder.0.join("checkpoints");
    let (theirs, ours) = (weight(&[3.0, 0.25]), weight(&[1.0, 2.0]));
    let fails = Arc::new(AtomicBool::new(false));
    let (their_weight, their_failure) = (theirs.clone(), Arc::clone(&fails));
    pair(
        move |worker| {
            let scale = their_weight.clone();
            worker
                .register("scale", move |request| {
                    Ok(Message::new("", [request.tensor(0)?.mul(&scale)?])?)
                })
                .unwrap();
            let optimizer = Adam::new(0.05).create(worker, "", [&their_weight]).unwrap();
            // The part goes on without this handle, and without that of the optimizer.
            CheckpointContents::new()
                .tensors([("back.weight", &their_weight)])
                .optimizer("adam", &optimizer)
                .load_values(move |_| match their_failure.load(Ordering::SeqCst) {
                    true => Err(Error::new(Code::OutOfRange, "not today").into()),
                    false => Ok(()),
                })
                .create(worker, "job")
                .unwrap();
        },
        |worker| {
            let position = Arc::new(AtomicUsize::new(0));
            let (save, load) = (Arc::clone(&position), Arc::clone(&position));
            let optimizer = Adam::new(0.05).create(worker, "", [&ours]).unwrap();
            let part = CheckpointContents::new()
                .tensors([("front.weight", &ours)])
                .optimizer("adam", &optimizer)
                .save_values(move || {
                    let at = save.load(Ordering::Relaxed).to_string();
                    Ok(CheckpointValues::from([("position".into(), at.into_bytes())]))
                })
                .load_values(move |loaded| {
                    assert_eq!(loaded.workers["front"], loaded.values);
                    assert!(loaded.workers["back"].is_empty());
                    let text = std::str::from_utf8(&loaded.values["position"])?;
                    load.store(text.parse()?, Ordering::Relaxed);
                    Ok(())
                })
                .create(worker, "job")
                .unwrap();
            let of = CheckpointManagerOptions::new().name("job").keep(2);
            let checkpoints = of.create(worker, &path).unwrap();
            let newest = LoadOptions::new();
            assert_eq!(checkpoints.load(&newest).unwrap_err().code(), Code::NotFound);
            assert_eq!(of.create(worker, &path).unwrap_err().code(), Code::Aborted);
            let now = || (numbers(&ours), numbers(&theirs), position.load(Ordering::Relaxed));
            let go_on = || train(worker, &ours, &optimizer, &position);

            go_on();
            go_on();
            let at_two = now();
            checkpoints.save(2, None).unwrap();
            go_on();
            let at_three = now();
            let written = checkpoints.save_async(3, LONG).unwrap();
            let (sender, receiver) = mpsc::channel();
            written.then(move || sender.send(()).unwrap()).unwrap();
            go_on(); // while that is written
            go_on();
            let at_five = now();
            written.wait().unwrap();
            receiver.recv().unwrap();

            // The same bits, and the same steps from there on.
            let loaded = checkpoints.load(&newest).unwrap();
            assert_eq!((loaded.step, now()), (3, at_three));
            assert!(loaded.folder.ends_with("step-000003") && loaded.missing.is_empty());
            go_on();
            go_on();
            assert_eq!(now(), at_five);
            let second = newest.step(2).timeout(LONG);
            assert_eq!(load_checkpoint(worker, &path, &second, &of).unwrap().step, 2);
            assert_eq!(now(), at_two);
            for step in [4, -1] {
                let error = checkpoints.load(&newest.step(step)).unwrap_err();
                assert_eq!(error.code(), Code::NotFound);
            }

            // The error of the other worker's function.
            fails.store(true, Ordering::SeqCst);
            let error = checkpoints.load(&newest).unwrap_err();
            assert_eq!(error.code(), Code::OutOfRange);
            assert!(error.message().contains("back") && error.message().contains("not today"));
            let origin = error.origin().unwrap();
            assert_eq!((origin.rank, origin.kind), (1, OriginKind::Handler));
            fails.store(false, Ordering::SeqCst);

            // A damaged byte is found, and an older checkpoint can be had.
            let shard = path.join("step-000003/model-00001-of-00002.safetensors");
            let mut bytes = fs::read(&shard).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&shard, bytes).unwrap();
            let error = checkpoints.load(&newest).unwrap_err();
            assert_eq!(error.code(), Code::DataLoss, "{error}");
            assert_eq!(checkpoints.load(&newest.fall_back(true)).unwrap().step, 2);

            // Without a part there is nothing to save, and what is gone is missed.
            part.remove().unwrap();
            part.remove().unwrap();
            assert_eq!(checkpoints.save(4, None).unwrap_err().code(), Code::FailedPrecondition);
            let more = floats(&[1.0]);
            CheckpointContents::new()
                .tensors([("front.weight", &more), ("more", &more)])
                .create(worker, "job")
                .unwrap();
            let error = checkpoints.load(&newest.step(2)).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            let some = checkpoints.load(&newest.step(2).strict(false)).unwrap();
            assert_eq!((some.missing.len(), some.mismatched.len()), (1, 1));
            assert!(!some.unexpected.is_empty() && some.missing[0].contains("more"));
            assert_eq!(checkpoints.save(4, None).unwrap_err().code(), Code::FailedPrecondition);
            drop(checkpoints);
            let dropping = of.allow_dropping(true).workers(["front"]);
            dropping.create(worker, &path).unwrap().save(4, LONG).unwrap();
            assert_eq!(
                numbers(
                    &load_safetensors(path.join("step-000004/model-00001-of-00001.safetensors"))
                        .unwrap()["more"]
                ),
                [1.0]
            );
        },
    );
}

/// A job of this process alone, whose store stays: managers ask it who is in the job.
fn alone_in(folder: &Folder) -> Worker {
    folder.options().name("alone").rank(0, 1).create().unwrap()
}

#[test]
fn failures_and_panics_are_errors_of_the_save() {
    let folder = Folder::new();
    let (worker, x) = (alone_in(&folder), weight(&[1.0]));
    let how = Arc::new(Mutex::new("panics"));
    let ours = Arc::clone(&how);
    CheckpointContents::new()
        .tensors([("x", &x)])
        .save_values(move || match *ours.lock().unwrap() {
            "panics" => panic!("oh"),
            "fails" => Err("no disk of mine".into()),
            _ => Ok(CheckpointValues::from([("large".into(), vec![0; 2 << 20])])),
        })
        .create(&worker, "")
        .unwrap();
    let checkpoints = CheckpointManagerOptions::new().create(&worker, &folder.0).unwrap();
    let said = |next: &'static str| {
        let error = checkpoints.save(1, None).unwrap_err();
        *how.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = next;
        how.clear_poison();
        error
    };
    let error = said("fails");
    assert_eq!(error.code(), Code::Internal);
    assert!(error.message().contains("save_values panicked: oh"), "{error}");
    let error = said("is large");
    assert_eq!(error.code(), Code::Unknown);
    assert!(error.message().contains("no disk of mine"));
    assert_eq!(said("").code(), Code::InvalidArgument);
    assert_eq!(checkpoints.save(-1, None).unwrap_err().code(), Code::InvalidArgument);

    // Of contents.
    let twice = CheckpointContents::new().tensors([("x", &x), ("x", &x)]);
    assert!(format!("{twice:?}").contains("2 tensors"));
    assert_eq!(twice.create(&worker, "a").unwrap_err().code(), Code::InvalidArgument);
    let again = CheckpointContents::new().create(&worker, "");
    assert_eq!(again.unwrap_err().code(), Code::AlreadyExists);
    let sgd = Sgd::new(0.1).create(&worker, "", [&x]).unwrap();
    let unnamed = CheckpointContents::new().optimizer("sgd", &sgd).create(&worker, "a");
    assert_eq!(unnamed.unwrap_err().code(), Code::InvalidArgument);
}

/// Whatever became of it and of its worker.
#[test]
fn a_part_takes_no_optimizer_of_another_worker() {
    let (here, there, gone, x) = (alone(), alone(), alone(), weight(&[1.0]));
    let theirs = Sgd::new(0.1).create(&there, "", [&x]).unwrap();
    let removed = Sgd::new(0.1).create(&gone, "", [&x]).unwrap();
    removed.remove().unwrap();
    gone.close(None).unwrap();
    for optimizer in [&removed, &theirs] {
        let contents = CheckpointContents::new().tensors([("x", &x)]);
        let error = contents.optimizer("sgd", optimizer).create(&here, "x").unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        let says = "optimizers[0] is a part of worker 'alone': give one of the part's own worker";
        assert!(error.message().contains(says), "{error}");
    }
}

#[test]
fn functions_are_dropped_with_the_part_or_its_worker() {
    struct Count(Arc<AtomicUsize>);
    impl Drop for Count {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let folder = Folder::new();
    let (worker, x) = (alone_in(&folder), weight(&[1.0]));
    let dropped = Arc::new(AtomicUsize::new(0));
    let part = |name: &str| {
        let count = Count(Arc::clone(&dropped));
        CheckpointContents::new()
            .tensors([("x", &x)])
            .save_values(move || {
                let _ = &count;
                Ok(CheckpointValues::new())
            })
            .create(&worker, name)
    };
    let one = part("one").unwrap();
    part("one").unwrap_err();
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    part("two").unwrap();
    one.remove().unwrap();
    assert_eq!(dropped.load(Ordering::SeqCst), 2);

    // A save that is on its way when its worker ends is written, or fails.
    let of = CheckpointManagerOptions::new().name("two");
    let checkpoints = of.create(&worker, &folder.0).unwrap();
    let written = checkpoints.save_async(1, None).unwrap();
    worker.close(None).unwrap();
    assert!(written.is_done());
    assert_eq!(dropped.load(Ordering::SeqCst), 3);
    assert_eq!(checkpoints.save(2, None).unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(one.remove().unwrap_err().code(), Code::FailedPrecondition);
}
