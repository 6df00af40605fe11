//! What the examples share: a job of several processes on this machine, which are this program again.
//! Jobs on several machines are started by a launcher instead, and find each other by `env://`.
use distgrad::{Worker, WorkerOptions};
use std::{
    env,
    error::Error,
    fs, io,
    path::PathBuf,
    process::{self, Child, Command},
    time::Duration,
};

pub const MINUTE: Duration = Duration::from_secs(60);

/// Says to a started process which worker it is: its rank and the folder of the rendezvous.
const MEMBER: &str = "DISTGRAD_EXAMPLE_MEMBER";

/// This process's part.
pub struct Job {
    pub worker: Worker,
    others: Vec<Process>, // of the first process
    folder: Option<PathBuf>,
}

impl Job {
    /// Starts a process for each name but the first, which is this one's, and joins the job.
    pub fn start(names: &[&str]) -> Result<Job, Box<dyn Error>> {
        let member = env::var(MEMBER).ok();
        let (rank, folder) = match member.as_ref().and_then(|member| member.split_once(':')) {
            Some((rank, folder)) => (rank.parse()?, PathBuf::from(folder)),
            None => (0, env::temp_dir().join(format!("distgrad-example-{}", process::id()))),
        };
        let mut others = Vec::new();
        if member.is_none() {
            fs::create_dir(&folder)?;
            for rank in 1..names.len() {
                let child = Command::new(env::current_exe()?)
                    .args(env::args_os().skip(1))
                    .env(MEMBER, format!("{rank}:{}", folder.display()))
                    .spawn()?;
                others.push(Process(child));
            }
        }
        let worker = WorkerOptions::new()
            .name(names[rank])
            .rank(rank as u32, names.len() as u32)
            .rendezvous(format!("file://{}/workers", folder.display()))
            .create()?;
        Ok(Job { worker, others, folder: member.is_none().then_some(folder) })
    }

    pub fn is_first(&self) -> bool {
        self.worker.rank() == 0
    }

    /// Ends in good order, all together. Whoever has nothing else to do answers the others until
    /// then, for as long as that takes.
    pub fn finish(self) -> Result<(), Box<dyn Error>> {
        match self.is_first() {
            true => self.worker.shutdown(None)?,
            false => self.worker.serve()?,
        }
        for mut other in self.others {
            let status = other.0.wait()?;
            if !status.success() {
                return Err(io::Error::other(format!("a process of the job: {status}")).into());
            }
        }
        match self.folder {
            Some(folder) => Ok(fs::remove_dir_all(folder)?),
            None => Ok(()),
        }
    }
}

/// Ends with the first process, also when that fails.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
