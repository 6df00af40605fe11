//! The members, contexts and passes that a worker knows of.
use crate::ffi::{RawContextState, RawMember, RawMemberEvent, RawPassState};

/// A member of a job, as a worker knows it.
///
/// ```
/// use distgrad::{Member, WorkerOptions};
/// let worker = WorkerOptions::new().name("alone").create()?;
/// let members: Vec<Member> = worker.members()?;
/// assert_eq!((&members[0].name[..], members[0].rank), ("alone", 0));
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_member")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// Unique in the job.
    pub name: String,
    /// Its rank in the job.
    pub rank: u32,
    /// Greater for each later start of a worker of that name.
    pub incarnation: u64,
}

/// Something that happened to a member of a job; see [`Worker::on_member`](crate::Worker::on_member).
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{MemberEvent, MemberEventKind};
/// worker.on_member(|event: MemberEvent| {
///     if event.kind == MemberEventKind::Lost {
///         eprintln!("{} is lost: {}", event.member.name, event.reason);
///     }
/// })
/// # }
/// ```
#[doc(alias = "dg_member_event")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberEvent {
    /// The member that it happened to.
    pub member: Member,
    /// What happened.
    pub kind: MemberEventKind,
    /// Why it counts as lost; empty otherwise.
    pub reason: String,
}

/// What can happen to a member of a job.
///
/// ```
/// use distgrad::MemberEventKind;
/// fn word(kind: MemberEventKind) -> &'static str {
///     match kind {
///         MemberEventKind::Joined => "joined",
///         MemberEventKind::Left => "left",
///         MemberEventKind::Lost => "lost",
///         _ => "something new", // later versions may have more
///     }
/// }
/// assert_eq!(word(MemberEventKind::Left), "left");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemberEventKind {
    /// It is new, or has come back.
    Joined,
    /// It has left, in good order.
    Left,
    /// It died, or is silent.
    Lost,
    /// Something that this version of the crate does not know.
    Other,
}

/// What a barrier, [`shutdown`](crate::Worker::shutdown) and [`serve`](crate::Worker::serve) do
/// when a member is lost.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::OnLost;
/// worker.shutdown_with(None, OnLost::GoOnWithout) // of those who are still there
/// # }
/// ```
#[doc(alias = "DG_GO_ON_WITHOUT_LOST")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLost {
    /// They fail at once, with `Code::Unavailable` and the member's name.
    #[default]
    Fail,
    /// They go on, as if it had left.
    GoOnWithout,
}

impl OnLost {
    pub(crate) fn flags(self) -> u64 {
        match self {
            OnLost::Fail => 0,
            OnLost::GoOnWithout => 1, // DG_GO_ON_WITHOUT_LOST
        }
    }
}

impl From<RawMemberEvent> for MemberEvent {
    fn from(raw: RawMemberEvent) -> Self {
        let kind = match raw.kind {
            1 => MemberEventKind::Joined,
            2 => MemberEventKind::Left,
            3 => MemberEventKind::Lost,
            _ => MemberEventKind::Other,
        };
        let member = Member { name: raw.name, rank: raw.rank as u32, incarnation: raw.incarnation };
        Self { member, kind, reason: raw.reason }
    }
}

/// What a worker holds of a context.
///
/// ```
/// use distgrad::{ContextState, WorkerOptions};
/// let worker = WorkerOptions::new().create()?;
/// let context = worker.context()?;
/// let states: Vec<ContextState> = worker.contexts()?;
/// assert_eq!((states.len(), states[0].id), (1, context.id()));
/// assert!(states[0].passes.is_empty()); // no backward runs
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_context_state")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContextState {
    /// The origin's rank in the top 16 bits.
    pub id: u64,
    /// How many messages with tensors that require grad were sent.
    pub sends: u64,
    /// How many such messages were received.
    pub receives: u64,
    /// How many leaves of this worker have a gradient.
    pub gradients: u64,
    /// The ranks of the workers with which it exchanged messages.
    pub peers: Vec<u32>,
    /// The backward passes that run here.
    pub passes: Vec<PassState>,
}

/// A backward pass that runs on a worker, and what it waits for.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::PassState;
/// fn only_waits(pass: &&PassState) -> bool {
///     pass.busy == 0 && !pass.awaited.is_empty()
/// }
/// for context in worker.contexts()? {
///     for pass in context.passes.iter().filter(only_waits) {
///         println!("pass {:#x} waits for workers {:?}", pass.id, pass.awaited);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pass_state")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassState {
    /// The initiator's rank in the top 16 bits.
    pub id: u64,
    /// Whether another backward may follow.
    pub retain_graph: bool,
    /// Send nodes and roots that run or are about to.
    pub busy: u64,
    /// The ranks of the workers whose gradients have not come, once for each message sent there.
    pub awaited: Vec<u32>,
    /// The ranks of the workers that have not acknowledged a message, once for each message.
    pub unacknowledged: Vec<u32>,
}

impl From<RawMember> for Member {
    fn from(raw: RawMember) -> Self {
        Self { name: raw.name, rank: raw.rank as u32, incarnation: raw.incarnation }
    }
}

impl From<RawContextState> for ContextState {
    fn from(raw: RawContextState) -> Self {
        Self {
            id: raw.id,
            sends: raw.sends,
            receives: raw.receives,
            gradients: raw.gradients,
            peers: raw.peers,
            passes: raw.passes.into_iter().map(PassState::from).collect(),
        }
    }
}

impl From<RawPassState> for PassState {
    fn from(raw: RawPassState) -> Self {
        Self {
            id: raw.id,
            retain_graph: raw.flags & 1 != 0,
            busy: raw.busy,
            awaited: raw.awaited,
            unacknowledged: raw.unacknowledged,
        }
    }
}
