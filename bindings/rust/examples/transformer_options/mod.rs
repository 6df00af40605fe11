//! The command line of the transformer.
use crate::checkpoints;
use distgrad::{CheckpointValues, Schedule};
use std::{env, error::Error};

const USAGE: &str = "transformer FILE [--OPTION=VALUE...]: the options stand in transformer.rs; \
    --width is a multiple of 4, --batch one of --replicas, and each replica has --micro-batches rows \
    or more; --in-flight is 8 at most; --resume needs --checkpoint";

/// What it says, each option with a default.
pub struct Options {
    pub file: String,
    pub stages: usize,
    pub schedule: String,
    pub micro_batches: usize,
    pub replicas: usize,
    pub in_flight: usize, // steps
    pub steps: usize,
    pub batch: usize, // of all replicas
    pub blocks: usize,
    pub width: usize,
    pub context: usize,
    pub sample: usize, // characters of each text that the model writes
    pub output: String,
    pub checkpoint: Option<String>,
    pub every: usize, // steps
    pub resume: bool,
}

impl Options {
    pub fn read() -> Result<Self, Box<dyn Error>> {
        let mut options = Self {
            file: String::new(),
            stages: 2,
            schedule: "zb_h1".into(),
            micro_batches: 8,
            replicas: 1,
            in_flight: 2,
            steps: 1200,
            batch: 16,
            blocks: 4,
            width: 128,
            context: 128,
            sample: 300,
            output: "transformer".into(),
            checkpoint: None,
            every: 100,
            resume: false,
        };
        let mut arguments = env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let unknown = || format!("what is {argument}? {USAGE}");
            if !argument.starts_with("--") {
                if !options.file.is_empty() {
                    return Err(unknown().into());
                }
                options.file = argument;
                continue;
            }
            let (name, inline) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value.to_string())),
                None => (argument.as_str(), None),
            };
            let mut value = || {
                inline.clone().or_else(|| arguments.next()).ok_or(format!("{name} lacks its value"))
            };
            let number = match name {
                "--resume" if inline.is_none() => {
                    options.resume = true;
                    continue;
                }
                "--schedule" => {
                    options.schedule = value()?;
                    continue;
                }
                "--output" => {
                    options.output = value()?;
                    continue;
                }
                "--checkpoint" => {
                    options.checkpoint = Some(value()?);
                    continue;
                }
                "--stages" => &mut options.stages,
                "--micro-batches" => &mut options.micro_batches,
                "--replicas" => &mut options.replicas,
                "--in-flight" => &mut options.in_flight,
                "--steps" => &mut options.steps,
                "--batch" => &mut options.batch,
                "--blocks" => &mut options.blocks,
                "--width" => &mut options.width,
                "--context" => &mut options.context,
                "--sample" => &mut options.sample,
                "--every" => &mut options.every,
                _ => return Err(unknown().into()),
            };
            let value = value()?;
            *number = value.parse().ok().filter(|n| *n > 0).ok_or(format!("{name}={value}?"))?;
        }
        options.check()?;
        Ok(options)
    }

    fn check(&self) -> Result<(), Box<dyn Error>> {
        let fits = !self.file.is_empty()
            && self.batch.is_multiple_of(self.replicas)
            && self.batch / self.replicas >= self.micro_batches
            && self.width.is_multiple_of(4)
            && self.in_flight <= 8
            && (self.checkpoint.is_some() || !self.resume);
        if !fits {
            return Err(USAGE.into());
        }
        let stages = self.schedule()?.data()?.rank_of_stage.len();
        if stages > self.blocks {
            return Err(format!("{} blocks cannot be {stages} stages", self.blocks).into());
        }
        if let (Some(folder), false) = (&self.checkpoint, self.resume) {
            checkpoints::check_is_new(folder)?;
        }
        Ok(())
    }

    /// With the optimizer's step of each stage behind its rank's list.
    pub fn schedule(&self) -> Result<Schedule, Box<dyn Error>> {
        let (stages, micro_batches) = (self.stages as u64, self.micro_batches as u64);
        let schedule = match self.schedule.as_str() {
            "gpipe" => Schedule::gpipe(stages, micro_batches),
            "1f1b" => Schedule::one_forward_one_backward(stages, micro_batches),
            "zb_h1" => Schedule::zero_bubble_h1(stages, micro_batches),
            "zb_h2" => Schedule::zero_bubble_h2(stages, micro_batches),
            "interleaved" => {
                Schedule::interleaved_one_forward_one_backward(stages, 2, micro_batches)
            }
            other => return Err(format!("there is no schedule {other}").into()),
        }?;
        Ok(schedule.with_steps()?)
    }

    /// What has to be the same for a run to go on as it would have.
    pub fn values(&self) -> CheckpointValues {
        let numbers = [
            ("steps", self.steps),
            ("batch", self.batch),
            ("blocks", self.blocks),
            ("width", self.width),
            ("context", self.context),
        ];
        numbers.map(|(name, value)| (name.into(), value.to_string().into_bytes())).into()
    }
}
