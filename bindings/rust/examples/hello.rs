//! One call: the front worker sends a greeting to the back worker, which is another process.
mod job;

use distgrad::Message;
use job::{Job, MINUTE};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let job = Job::start(&["front", "back"])?;
    job.worker.register("greet", |request| {
        Ok(Message::from_payload(format!("Hello {}, this is process two", request.text()?))?)
    })?;
    job.worker.barrier(MINUTE)?; // both have registered

    if job.is_first() {
        let request = Message::from_payload("process one")?;
        let reply = job.worker.call("back", "greet", &request)?;
        println!("{}", reply.text()?);
        assert_eq!(reply.text()?, "Hello process one, this is process two");
    }
    job.finish()
}
