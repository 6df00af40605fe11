//! Trains a small transformer on a text, a character at a time, as a pipeline over several
//! processes, or as several replicas of one, and has it write.
//!
//! `transformer FILE [--stages=N] [--schedule=gpipe|1f1b|interleaved|zb_h1|zb_h2] [--micro-batches=N]
//! [--replicas=N] [--in-flight=N] [--steps=N] [--batch=N] [--blocks=N] [--width=N] [--context=N]
//! [--sample=N] [--output=FOLDER] [--checkpoint=FOLDER [--every=N] [--resume]]`
//!
//! FILE is the text; `//examples:transformer`, which does the same in C++, takes the King James
//! Version of the Bible. Each replica is as many processes as there are `--stages`, and takes a part
//! of each batch. A step is started while others run, so that no process waits for the end of one;
//! with `--in-flight=1` it is not, and the losses are the same. A table and a picture of the loss and
//! what the model writes go to the folder `transformer`. With `--checkpoint` all is saved every 100
//! steps, at the end, and on Ctrl-C; with `--resume` it goes on, and with it its table, also with
//! other stages, replicas and schedule.
mod blocks;
mod checkpoints;
mod interrupt;
mod job;
mod text;
mod transformer_options;

use blocks::{loss, Shape, Stage};
use distgrad::{
    Adam, CheckpointContents, CheckpointManager, CheckpointManagerOptions, CheckpointPart, Context,
    GradientAverager, GradientAveragerOptions, Optimizer, Pipeline, PipelineStage, PipelineStages,
    PipelineStagesOptions, PipelineStep, ProcessGroup, ProcessGroupOptions, Result, Tensor, Worker,
};
use indicatif::{ProgressBar, ProgressStyle};
use job::{Job, MINUTE};
use std::{
    collections::VecDeque,
    error::Error,
    fmt::Write as _,
    fs::{self, File},
    io::{self, Write as _},
    process,
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc,
    },
    thread,
    time::{Duration, Instant},
};
use text::{Random, Text};
use transformer_options::Options;

/// The highest.
const LEARNING_RATE: f64 = 0.003;
/// The part of the steps in which the learning rate rises.
const WARM_UP: f64 = 0.05;
const ROUNDS: usize = 10;
/// Below 1 what is likely gets likelier.
const TEMPERATURE: f64 = 0.8;

/// Falls to 0, after a warm-up.
fn learning_rate(step: usize, steps: usize) -> f64 {
    let warm = ((step + 1) as f64 / (WARM_UP * steps as f64).max(1.0)).min(1.0);
    let left = 1.0 - step as f64 / steps as f64;
    LEARNING_RATE * warm * left
}

/// Of a replica's worker.
fn name(replica: usize, rank: usize) -> String {
    format!("replica{replica}.{rank}")
}

/// What a worker has of the model, with its optimizer, which steps in the schedule.
struct Part {
    stages: Vec<(u64, Stage)>,
    optimizer: Optimizer<'static>,
    taken: AtomicUsize, // so many steps
}

impl Part {
    fn new(options: &Options, shape: Shape, ranks: &[u32], rank: usize) -> Result<Self> {
        let numbers = (0..ranks.len()).filter(|stage| ranks[*stage] as usize == rank);
        let stages = numbers
            .map(|s| Ok((s as u64, Stage::new(shape, s as i64, ranks.len() as i64)?)))
            .collect::<Result<Vec<_>>>()?;
        let parameters = stages.iter().flat_map(|(_, stage)| stage.parameters());
        let optimizer = Adam::adamw(learning_rate(0, options.steps))
            .betas(0.9, 0.95)
            .weight_decay(0.1)
            .create_local(parameters.map(|(_, parameter)| parameter))?;
        Ok(Self { stages, optimizer, taken: AtomicUsize::new(0) })
    }

    fn parameters(&self) -> impl Iterator<Item = (String, &Tensor)> {
        self.stages.iter().flat_map(|(_, stage)| stage.parameters())
    }

    /// Lets the pipelines use the stages; with replicas, their gradients are averaged.
    fn add_stages<'w>(
        self: &Arc<Self>,
        worker: &'w Worker,
        options: &Options,
        averager: Option<&GradientAverager>,
    ) -> std::result::Result<PipelineStages<'w>, Box<dyn Error>> {
        let steps = options.steps;
        let mut stages: Vec<PipelineStage> = Vec::new();
        for (number, stage) in &self.stages {
            let stage = stage.clone();
            let made =
                PipelineStage::new(*number, move |batch| Ok([stage.forward(batch.input(0)?)?]))
                    .loss(|batch| Ok(loss(batch.output(0)?, batch.target(0)?)?));
            // One optimizer has the parameters of all stages here.
            let (part, is_first) = (Arc::clone(self), stages.is_empty());
            stages.push(made.step(move |context| match is_first {
                true => Ok(part.step(context, steps)?),
                false => Ok(()),
            }));
        }
        let processors = thread::available_parallelism()?.get();
        let threads = (processors / (options.replicas * options.stages)).max(1);
        let mut settings = PipelineStagesOptions::new().num_threads(threads as u64);
        if let Some(averager) = averager {
            settings = settings.averager(averager);
        }
        Ok(settings.create(worker, "transformer", stages)?)
    }

    fn step(&self, context: &Context<'_>, steps: usize) -> Result<()> {
        let step = self.taken.fetch_add(1, Ordering::Relaxed);
        self.optimizer.set_learning_rate(learning_rate(step, steps))?;
        self.optimizer.step(context)
    }

    /// Lets the first worker save what is here, and load it.
    fn add_to_checkpoints<'w>(
        self: &Arc<Self>,
        worker: &'w Worker,
        options: &Options,
    ) -> Result<CheckpointPart<'w>> {
        let (saved, wanted, part) = (options.values(), options.values(), Arc::clone(self));
        CheckpointContents::new()
            .tensors(self.parameters())
            .optimizer("adamw", &self.optimizer)
            .save_values(move || Ok(saved.clone()))
            .load_values(move |loaded| {
                part.taken.store(loaded.step as usize, Ordering::Relaxed);
                let mut all = loaded.workers.values().flatten();
                match all.find(|(name, value)| wanted.get(*name) != Some(*value)) {
                    None => Ok(()),
                    Some((name, value)) => {
                        let value = String::from_utf8_lossy(value);
                        Err(format!("the checkpoint is of a run with --{name}={value}").into())
                    }
                }
            })
            .create(worker, "")
    }
}

/// A step that was started, with its context, which outlives it.
struct InFlight<'w> {
    step: PipelineStep<'w>,
    _context: Context<'w>,
}

/// Leads one replica, on the worker of its first stage.
struct Leader<'a> {
    options: &'a Options,
    worker: &'a Worker,
    text: &'a Text,
    pipeline: Pipeline<'a>,
    leaders: Option<ProcessGroup>, // of all replicas
    replica: usize,
    checkpoints: Option<CheckpointManager<'a>>, // of the first replica
}

impl<'a> Leader<'a> {
    /// Starts a step with this replica's part of the batch.
    fn start(&self, step: usize) -> Result<InFlight<'a>> {
        let options = self.options;
        let (inputs, targets) = self.text.pieces(step, options.batch, options.context)?;
        let rows = (options.batch / options.replicas) as i64;
        let own = |all: &Tensor| all.narrow(0, self.replica as i64 * rows, rows);
        let context = self.worker.context()?;
        let step = self.pipeline.start(&context, &[&own(&inputs)?], &[&own(&targets)?])?;
        Ok(InFlight { step, _context: context })
    }

    /// Waits for a step. Returns the loss of the whole batch, and whether Ctrl-C has come.
    fn finish(&self, started: InFlight<'_>) -> Result<(f32, bool)> {
        let loss = started.step.wait()?.loss.expect("a loss").item()?;
        let Some(leaders) = &self.leaders else { return Ok((loss, interrupt::has_come())) };
        // Each replica waits here until all have taken the step: so a checkpoint may be saved now,
        // and all end after the same step.
        let interrupted = if interrupt::has_come() { 1.0 } else { 0.0 };
        let said = Tensor::from_slice(&[loss, interrupted], &[2])?;
        leaders.average([&said])?;
        let said = said.to_vec::<f32>()?;
        Ok((said[0], said[1] > 0.0))
    }

    /// After how many steps the parameters are tested or saved, which no step may change meanwhile.
    fn next_pause(&self, taken: usize) -> usize {
        let options = self.options;
        let after = |every: usize| (taken / every + 1) * every;
        let test = after(options.steps.div_ceil(ROUNDS)).min(options.steps);
        match options.checkpoint {
            Some(_) => test.min(after(options.every)),
            None => test,
        }
    }

    /// Takes the steps from `first` on, and returns how many have been taken then. Ends early, when
    /// what was started is over, on Ctrl-C.
    fn train(
        &self,
        first: usize,
        mut table: Option<&mut Table>,
    ) -> std::result::Result<usize, Box<dyn Error>> {
        let options = self.options;
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {eta} left, {msg}")?;
        let bar = if self.replica == 0 {
            ProgressBar::new(options.steps as u64)
        } else {
            ProgressBar::hidden()
        };
        let bar = bar.with_style(style).with_position(first as u64);
        let begin = Instant::now();
        let mut tested = Duration::ZERO;
        let mut in_flight = VecDeque::new();
        let (mut started, mut last, mut interrupted) = (first, first, false);
        for taken in first + 1..=options.steps {
            let pause = self.next_pause(taken - 1);
            while started < pause && in_flight.len() < options.in_flight && !interrupted {
                match self.start(started) {
                    Ok(step) => in_flight.push_back(step),
                    Err(error) => {
                        // Where one that runs has failed that says why.
                        for InFlight { step, _context } in in_flight {
                            step.wait()?;
                        }
                        return Err(error.into());
                    }
                }
                started += 1;
            }
            let Some(step) = in_flight.pop_front() else { break };
            let loss;
            (loss, interrupted) = self.finish(step)?;
            last = taken;
            if let Some(table) = &mut table {
                table.add(taken, loss)?;
            }
            let tokens = ((taken - first) * options.batch * options.context) as f64;
            let rate = tokens / (begin.elapsed() - tested).as_secs_f64();
            bar.set_message(format!("loss {loss:.3}, {rate:.0} tokens/s"));
            bar.inc(1);
            if started > taken || self.replica > 0 {
                continue;
            }
            let is_last = interrupted || taken == options.steps;
            if let Some(checkpoints) = &self.checkpoints {
                if is_last || taken % options.every == 0 {
                    checkpoints.save(taken as i64, None)?;
                    bar.suspend(|| println!("saved the checkpoint of step {taken}"));
                }
            }
            let round = options.steps.div_ceil(ROUNDS);
            if !interrupted && (taken % round == 0 || is_last) {
                let began = Instant::now();
                let test = self.test()?;
                tested += began.elapsed();
                bar.suspend(|| {
                    println!(
                        "step {taken}: loss {loss:.3}, test loss {test:.3}, {rate:.0} tokens/s"
                    );
                });
            }
        }
        bar.finish();
        Ok(last)
    }

    fn test(&self) -> Result<f32> {
        let (inputs, targets) = self.text.test_pieces(self.options.batch, self.options.context)?;
        self.pipeline.evaluate(&[&inputs], &[&targets])?.loss.expect("a loss").item()
    }

    /// Some texts by the model, each from the beginning of a line on.
    fn write(&self) -> Result<String> {
        let count = self.options.micro_batches;
        let mut random = Random::new(1);
        let mut texts = vec![vec![self.text.line_end()]; count];
        for _ in 0..self.options.sample {
            let seen = texts[0].len().min(self.options.context);
            let recent = texts.iter().flat_map(|text| &text[text.len() - seen..]).copied();
            let recent = Tensor::from_vec(recent.collect(), &[count as i64, seen as i64])?;
            let result = self.pipeline.evaluate(&[&recent], &[])?;
            // A micro-batch is one text.
            for (text, outputs) in texts.iter_mut().zip(&result.outputs) {
                let scores = outputs[0].as_ref().expect("scores").select(1, seen as i64 - 1)?;
                let likely = scores.div_scalar(TEMPERATURE)?.softmax(-1)?.to_vec::<f32>()?;
                text.push(random.choose(&likely) as i64);
            }
        }
        Ok(texts.iter().map(|text| self.text.decode(&text[1..]) + "\n").collect())
    }
}

/// The losses by step, as a table, which is in its file as it grows.
struct Table {
    file: File,
    rows: Vec<(usize, f32)>,
}

impl Table {
    /// Begins one, with the rows of the first `steps` of the one there, for a run that goes on.
    fn new(output: &str, steps: usize) -> io::Result<Self> {
        let path = format!("{output}/training.csv");
        let before = fs::read_to_string(&path).unwrap_or_default();
        let mut table = Self { file: File::create(&path)?, rows: Vec::new() };
        writeln!(table.file, "step,loss")?;
        for line in before.lines() {
            let cells = line.split_once(',').map(|(step, loss)| (step.parse(), loss.parse()));
            if let Some((Ok(step), Ok(loss))) = cells {
                if step <= steps {
                    table.add(step, loss)?;
                }
            }
        }
        Ok(table)
    }

    fn add(&mut self, step: usize, loss: f32) -> io::Result<()> {
        self.rows.push((step, loss));
        writeln!(self.file, "{step},{loss}")
    }

    /// A line of the losses.
    fn picture(&self) -> String {
        const SIZE: [f32; 2] = [640.0, 360.0];
        let most = self.rows.iter().map(|(_, loss)| *loss).fold(f32::MIN_POSITIVE, f32::max);
        let last = self.rows.last().map_or(1, |(step, _)| *step);
        let mut points = String::new();
        for (step, loss) in &self.rows {
            let x = *step as f32 / last as f32 * SIZE[0];
            write!(points, "{x:.1},{:.1} ", SIZE[1] * (1.0 - loss / most)).expect("memory");
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\">\
             <text x=\"300\" y=\"20\" font-size=\"14\">loss by step: from {:.2} to {:.2}</text>\
             <polyline points=\"{points}\" fill=\"none\" stroke=\"#3572b0\"/></svg>\n",
            SIZE[0],
            SIZE[1],
            self.rows.first().map_or(most, |(_, loss)| *loss),
            self.rows.last().map_or(most, |(_, loss)| *loss),
        )
    }
}

/// Draws the losses, and writes what the model writes.
fn report(leader: &Leader<'_>, table: &Table) -> std::result::Result<f32, Box<dyn Error>> {
    let (output, test, sample) = (&leader.options.output, leader.test()?, leader.write()?);
    println!("{sample}");
    fs::write(format!("{output}/training.svg"), table.picture())?;
    fs::write(format!("{output}/sample.txt"), sample)?;
    println!("test loss {test:.3}; {output}/ has the table, the picture and the sample");
    Ok(test)
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let options = Options::read()?;
    let text = Text::load(&options.file, options.context)?;
    let shape = Shape {
        tokens: text.alphabet(),
        context: options.context as i64,
        width: options.width as i64,
        blocks: options.blocks as i64,
    };
    let schedule = options.schedule()?;
    let processes = options.replicas * options.stages;
    let names: Vec<String> =
        (0..processes).map(|i| name(i / options.stages, i % options.stages)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();

    let job = Job::start(&names)?;
    // Ctrl-C comes to all processes, which are needed until the steps in flight are over, and saved.
    interrupt::catch();
    let worker = &job.worker;
    let place = worker.rank() as usize;
    let (replica, rank) = (place / options.stages, place % options.stages);
    let part = Arc::new(Part::new(&options, shape, &schedule.data()?.rank_of_stage, rank)?);
    // Those of one rank average its gradients, and those that lead what they say between steps: a
    // step averages while the leaders are at the one before.
    let join = |name: String| {
        let replicas = options.replicas as u32;
        ProcessGroupOptions::new().name(name).rank(replica as u32, replicas).create(worker)
    };
    let (mut averager, mut leaders) = (None, None);
    if options.replicas > 1 {
        let parameters = part.parameters().map(|(_, parameter)| parameter);
        let group = join(format!("rank {rank}"))?;
        averager = Some(GradientAveragerOptions::new().create(&group, parameters)?);
        leaders = (rank == 0).then(|| join("leaders".into())).transpose()?;
    }
    let stages = part.add_stages(worker, &options, averager.as_ref())?;
    if options.checkpoint.is_some() {
        part.add_to_checkpoints(worker, &options)?;
    }
    worker.barrier(MINUTE)?; // all have their stages
    let checkpoints = match &options.checkpoint {
        Some(folder) if job.is_first() => {
            Some(CheckpointManagerOptions::new().create(worker, folder)?)
        }
        _ => None,
    };
    if let (Some(checkpoints), true) = (&checkpoints, options.resume) {
        println!("going on from step {}", checkpoints::resume(checkpoints)?);
    }
    worker.barrier(MINUTE)?; // all have what was loaded

    let mut interrupted = false;
    if rank == 0 {
        let workers = &names[place..place + options.stages];
        let leader = Leader {
            options: &options,
            worker,
            text: &text,
            pipeline: Pipeline::new(worker, "transformer", &schedule, workers)?,
            leaders,
            replica,
            checkpoints,
        };
        let output = &options.output;
        let first = part.taken.load(Ordering::Relaxed);
        let mut table = None;
        if replica == 0 {
            let begun = fs::create_dir_all(output).and_then(|()| Table::new(output, first));
            table = Some(begun.map_err(|e| format!("cannot write to {output}: {e}"))?);
        }
        interrupted = leader.train(first, table.as_mut())? < options.steps;
        if let (Some(table), false) = (&table, interrupted) {
            let test = report(&leader, table)?;
            if first == 0 {
                assert!(test < 0.8 * table.rows[0].1, "it has learnt nothing");
            }
        }
    }
    worker.barrier(None)?; // until then the others answer
    let is_first = job.is_first();
    drop(stages);
    job.finish()?;
    if is_first && interrupted {
        process::exit(130);
    }
    Ok(())
}
