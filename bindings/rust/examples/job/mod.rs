//! What the examples share: a job of several processes on this machine, which are this program again.
//! Where RANK is set, a launcher has started this process instead, perhaps on one of several machines.
use distgrad::{Worker, WorkerOptions};
use std::{
    cell::RefCell,
    env,
    error::Error,
    fs, io,
    path::{Path, PathBuf},
    process::{self, Child, Command},
    time::Duration,
};

pub const MINUTE: Duration = Duration::from_secs(60);

/// Says to a started process which worker it is: its rank and the folder of the rendezvous.
const MEMBER: &str = "DISTGRAD_EXAMPLE_MEMBER";

/// This process's part.
pub struct Job {
    pub worker: Worker,
    others: RefCell<Vec<Process>>, // of the first process
    folder: Option<Folder>,        // goes after them
}

impl Job {
    /// Starts a process for each name but the first, which is this one's, and joins the job; or joins
    /// that of the launcher. If TRACE is set, a trace of all that the worker does begins.
    pub fn start(names: &[&str]) -> Result<Job, Box<dyn Error>> {
        if let Ok(rank) = env::var("RANK") {
            let name = names.get(rank.parse::<usize>()?).ok_or("the job has fewer processes")?;
            let worker = WorkerOptions::new().name(*name).create()?;
            return Self::joined(worker, Vec::new(), None);
        }
        let member = env::var(MEMBER).ok();
        let (rank, path, folder) = match member.as_ref().and_then(|member| member.split_once(':')) {
            Some((rank, path)) => (rank.parse()?, PathBuf::from(path), None),
            None => {
                let folder = Folder::new()?;
                (0, folder.0.clone(), Some(folder))
            }
        };
        let mut others = Vec::new();
        if folder.is_some() {
            for rank in 1..names.len() {
                others.push(Process::start(rank, &path)?);
            }
        }
        let worker = WorkerOptions::new()
            .name(names[rank])
            .rank(rank as u32, names.len() as u32)
            .rendezvous(format!("file://{}/workers", path.display()))
            .create()?;
        Self::joined(worker, others, folder)
    }

    fn joined(
        worker: Worker,
        others: Vec<Process>,
        folder: Option<Folder>,
    ) -> Result<Job, Box<dyn Error>> {
        if env::var_os("TRACE").is_some() {
            worker.start_trace(None)?;
        }
        Ok(Job { worker, others: RefCell::new(others), folder })
    }

    pub fn is_first(&self) -> bool {
        self.worker.rank() == 0
    }

    /// Starts those processes again that a signal has ended, as a launcher does.
    #[allow(dead_code)] // of most examples
    pub fn restart_killed(&self) -> Result<(), Box<dyn Error>> {
        let Some(folder) = &self.folder else { return Ok(()) };
        for other in self.others.borrow_mut().iter_mut() {
            if other.child.try_wait()?.is_some_and(|status| status.code().is_none()) {
                *other = Process::start(other.rank, &folder.0)?;
            }
        }
        Ok(())
    }

    // [doc: trace]
    /// Ends the worker's trace, and writes it to FOLDER/trace.RANK.json.
    fn write_trace(&self, folder: &Path) -> Result<(), Box<dyn Error>> {
        let path = folder.join(format!("trace.{}.json", self.worker.rank()));
        Ok(fs::write(path, self.worker.stop_trace()?)?)
    }
    // [doc: end]

    /// Ends in good order, all together. Whoever has nothing else to do answers the others until
    /// then, for as long as that takes.
    pub fn finish(self) -> Result<(), Box<dyn Error>> {
        match self.is_first() {
            true => self.worker.shutdown(None)?,
            false => self.worker.serve()?,
        }
        if let Some(folder) = env::var_os("TRACE") {
            self.write_trace(Path::new(&folder))?;
        }
        for mut other in self.others.into_inner() {
            let status = other.child.wait()?;
            if !status.success() {
                return Err(io::Error::other(format!("a process of the job: {status}")).into());
            }
        }
        Ok(())
    }
}

/// The rendezvous of a job, which goes with it.
struct Folder(PathBuf);

impl Folder {
    /// One of the same number may be there: of a process that was killed, or of another container.
    fn new() -> io::Result<Self> {
        let mut tries = 0;
        loop {
            let path = env::temp_dir().join(format!("distgrad-example-{}.{tries}", process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Ends with the first process, also when that fails.
struct Process {
    rank: usize,
    child: Child,
}

impl Process {
    fn start(rank: usize, folder: &Path) -> io::Result<Self> {
        let child = Command::new(env::current_exe()?)
            .args(env::args_os().skip(1))
            .env(MEMBER, format!("{rank}:{}", folder.display()))
            .spawn()?;
        Ok(Self { rank, child })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
