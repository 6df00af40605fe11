//! A Rust worker, a C worker and a C++ worker in one context: a call through all three, and one
//! backward through all three. It has a `main` of its own for the programs of the other two, which
//! are its arguments: tests/integration/languages.
mod common;
use common::{Folder, LONG};
use distgrad::{Message, Tensor};
use std::{
    env,
    process::{Child, Command},
};

/// Ends with the test, also when that fails.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let programs: Vec<String> = env::args().skip(1).collect();
    if programs.len() != 2 || programs[0].starts_with('-') {
        println!("skipped: needs the C and the C++ worker, as Bazel gives them");
        return Ok(());
    }
    let folder = Folder::new();
    let rendezvous = format!("file://{}/workers", folder.0.display());
    let mut others = Vec::new();
    for program in &programs {
        others.push(Program(Command::new(program).arg(&rendezvous).spawn()?));
    }
    let worker = folder.options().name("rust").rank(0, 3).create()?;
    worker.barrier(LONG)?;

    let x = Tensor::from_slice(&[1.0f32, 2.0], &[2])?.require_grad()?;
    let context = worker.context()?;
    // Rust to C to C++, and all the way back: x * [3, 4] * [5, 6].
    let reply = context.call("c", "forward", &Message::new("", [&x])?)?;
    let product = reply.tensor(0)?;
    assert_eq!(product.to_vec::<f32>()?, [15.0, 48.0]);
    context.backward([product.square()?.sum()?])?;

    assert_eq!(context.gradient(&x)?.to_vec::<f32>()?, [450.0, 2304.0]);
    for (name, expected) in [("c", [150.0, 1152.0]), ("cc", [90.0, 768.0])] {
        let gradient = context.call(name, "gradient", &Message::from_payload("")?)?.tensor(0)?;
        assert_eq!(gradient.to_vec::<f32>()?, expected, "of worker {name}");
    }

    drop(context);
    worker.shutdown(LONG)?;
    for mut other in others {
        assert!(other.0.wait()?.success());
    }
    println!("one backward through Rust, C and C++");
    Ok(())
}
