//! What the examples share: a job of several processes on this machine, which are this program again.
//! Where RANK is set, a launcher has started this process instead, perhaps on one of several machines.
use distgrad::{Worker, WorkerOptions};
use std::{
    cell::RefCell,
    env,
    error::Error,
    ffi::{c_char, c_uint},
    fs::{self, File},
    io,
    os::fd::{AsRawFd, FromRawFd, RawFd},
    path::Path,
    process::{self, Child, Command},
    time::Duration,
};

pub const MINUTE: Duration = Duration::from_secs(60);

/// Says to a started process which worker it is: its rank and the path of the rendezvous.
const MEMBER: &str = "DISTGRAD_EXAMPLE_MEMBER";

/// This process's part.
pub struct Job {
    pub worker: Worker,
    others: RefCell<Vec<Process>>, // of the first process
    rendezvous: Option<Rendezvous>,
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
        let (rank, path, rendezvous) = match member.as_ref().and_then(|it| it.split_once(':')) {
            Some((rank, path)) => (rank.parse()?, path.to_owned(), None),
            None => {
                let rendezvous = Rendezvous::new()?;
                (0, rendezvous.path(), Some(rendezvous))
            }
        };
        let mut others = Vec::new();
        if rendezvous.is_some() {
            for rank in 1..names.len() {
                others.push(Process::start(rank, &path)?);
            }
        }
        let worker = WorkerOptions::new()
            .name(names[rank])
            .rank(rank as u32, names.len() as u32)
            .rendezvous(format!("file://{path}"))
            .create()?;
        Self::joined(worker, others, rendezvous)
    }

    fn joined(
        worker: Worker,
        others: Vec<Process>,
        rendezvous: Option<Rendezvous>,
    ) -> Result<Job, Box<dyn Error>> {
        if env::var_os("TRACE").is_some() {
            worker.start_trace(None)?;
        }
        Ok(Job { worker, others: RefCell::new(others), rendezvous })
    }

    pub fn is_first(&self) -> bool {
        self.worker.rank() == 0
    }

    /// Starts those processes again that a signal has ended, as a launcher does.
    #[allow(dead_code)] // of most examples
    pub fn restart_killed(&self) -> Result<(), Box<dyn Error>> {
        let Some(rendezvous) = &self.rendezvous else { return Ok(()) };
        for other in self.others.borrow_mut().iter_mut() {
            if other.child.try_wait()?.is_some_and(|status| status.code().is_none()) {
                *other = Process::start(other.rank, &rendezvous.path())?;
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

/// The rendezvous of a job: a file in memory, of which nothing is left, however this process ends.
struct Rendezvous(File);

impl Rendezvous {
    fn new() -> io::Result<Self> {
        extern "C" {
            // Of the C library, which Rust's own stands on.
            fn memfd_create(name: *const c_char, flags: c_uint) -> RawFd;
        }
        const MFD_CLOEXEC: c_uint = 1;
        // SAFETY: the name is a string of C's.
        let fd = unsafe { memfd_create(c"rendezvous".as_ptr(), MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is open, and nobody else's.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Where the other processes find it, as long as this one runs.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.0.as_raw_fd())
    }
}

/// Ends with the first process, also when that fails.
struct Process {
    rank: usize,
    child: Child,
}

impl Process {
    fn start(rank: usize, rendezvous: &str) -> io::Result<Self> {
        let child = Command::new(env::current_exe()?)
            .args(env::args_os().skip(1))
            .env(MEMBER, format!("{rank}:{rendezvous}"))
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
