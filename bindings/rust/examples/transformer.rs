//! Trains a small transformer on a text, a character at a time, as a pipeline over several
//! processes, or as several replicas of one, and has it write.
//!
//! `transformer FILE [--stages=N] [--schedule=gpipe|1f1b|interleaved|zb_h1|zb_h2] [--micro-batches=N]
//! [--replicas=N] [--steps=N] [--batch=N] [--blocks=N] [--width=N] [--context=N] [--output=FOLDER]`
//!
//! FILE is the text; `//examples:transformer`, which does the same in C++, takes the King James
//! Version of the Bible. Each replica is as many processes as there are `--stages`, and takes a part
//! of each batch. A table and a picture of the loss and what the model writes go to the folder
//! `transformer`.
mod blocks;
mod job;
mod text;

use blocks::{loss, Shape, Stage};
use distgrad::{
    Adam, GradientAverager, GradientAveragerOptions, Optimizer, Pipeline, PipelineStage,
    PipelineStages, PipelineStagesOptions, ProcessGroup, ProcessGroupOptions, Result, Schedule,
    Tensor, Worker,
};
use indicatif::{ProgressBar, ProgressStyle};
use job::{Job, MINUTE};
use std::{env, error::Error, fmt::Write, fs, thread, time::Instant};
use text::{Random, Text};

const LEARNING_RATE: f64 = 0.003;
/// The part of the steps in which the learning rate rises.
const WARM_UP: f64 = 0.05;
const ROUNDS: usize = 10;
/// Of each text that the model writes.
const SAMPLE: usize = 300;
/// Below 1 what is likely gets likelier.
const TEMPERATURE: f64 = 0.8;

/// What the command line says.
struct Options {
    file: String,
    stages: usize,
    schedule: String,
    micro_batches: usize,
    replicas: usize,
    steps: usize,
    batch: usize, // of all replicas
    blocks: usize,
    width: usize,
    context: usize,
    output: String,
}

impl Options {
    fn read() -> std::result::Result<Self, Box<dyn Error>> {
        let mut options = Self {
            file: String::new(),
            stages: 2,
            schedule: "zb_h1".into(),
            micro_batches: 8,
            replicas: 1,
            steps: 1200,
            batch: 16,
            blocks: 4,
            width: 128,
            context: 128,
            output: "transformer".into(),
        };
        for argument in env::args().skip(1) {
            let Some((name, value)) = argument.split_once('=') else {
                options.file = argument;
                continue;
            };
            let number = match name {
                "--schedule" => {
                    options.schedule = value.into();
                    continue;
                }
                "--output" => {
                    options.output = value.into();
                    continue;
                }
                "--stages" => &mut options.stages,
                "--micro-batches" => &mut options.micro_batches,
                "--replicas" => &mut options.replicas,
                "--steps" => &mut options.steps,
                "--batch" => &mut options.batch,
                "--blocks" => &mut options.blocks,
                "--width" => &mut options.width,
                "--context" => &mut options.context,
                _ => return Err(format!("what is {name}?").into()),
            };
            *number = value.parse().ok().filter(|n| *n > 0).ok_or(format!("{argument}?"))?;
        }
        let fits = !options.file.is_empty()
            && options.batch.is_multiple_of(options.replicas)
            && options.batch / options.replicas >= options.micro_batches
            && options.width.is_multiple_of(4);
        if !fits {
            const USAGE: &str =
                "transformer FILE [--OPTION=VALUE...]: --width is a multiple of 4, \
                --batch one of --replicas, and each replica has --micro-batches rows or more";
            return Err(USAGE.into());
        }
        let stages = options.schedule()?.data()?.rank_of_stage.len();
        if stages > options.blocks {
            return Err(format!("{} blocks cannot be {stages} stages", options.blocks).into());
        }
        Ok(options)
    }

    fn schedule(&self) -> std::result::Result<Schedule, Box<dyn Error>> {
        let (stages, micro_batches) = (self.stages as u64, self.micro_batches as u64);
        Ok(match self.schedule.as_str() {
            "gpipe" => Schedule::gpipe(stages, micro_batches),
            "1f1b" => Schedule::one_forward_one_backward(stages, micro_batches),
            "zb_h1" => Schedule::zero_bubble_h1(stages, micro_batches),
            "zb_h2" => Schedule::zero_bubble_h2(stages, micro_batches),
            "interleaved" => {
                Schedule::interleaved_one_forward_one_backward(stages, 2, micro_batches)
            }
            other => return Err(format!("there is no schedule {other}").into()),
        }?)
    }

    /// Of the worker of rank `of_rank` of a replica.
    fn name(replica: usize, of_rank: usize) -> String {
        format!("replica{replica}.{of_rank}")
    }
}

/// Leads one replica, on the worker of its first stage.
struct Leader<'a> {
    options: &'a Options,
    worker: &'a Worker,
    text: &'a Text,
    pipeline: Pipeline<'a>,
    optimizer: &'a Optimizer<'a>,
    leaders: Option<&'a ProcessGroup>, // of all replicas
    replica: usize,
}

impl Leader<'_> {
    /// Takes a step with this replica's part of the batch; returns the loss of all of it.
    fn step(&self, step: usize) -> Result<f32> {
        let options = self.options;
        let (inputs, targets) = self.text.pieces(step, options.batch, options.context)?;
        let rows = (options.batch / options.replicas) as i64;
        let own = |all: &Tensor| all.narrow(0, self.replica as i64 * rows, rows);
        let warm = ((step + 1) as f64 / (WARM_UP * options.steps as f64).max(1.0)).min(1.0);
        let left = 1.0 - step as f64 / options.steps as f64;
        // All replicas set the same, and none before all have taken the step before.
        self.optimizer.set_learning_rate(LEARNING_RATE * warm * left)?;
        let context = self.worker.context()?;
        let result = self.pipeline.train(&context, &[&own(&inputs)?], &[&own(&targets)?])?;
        self.optimizer.step(&context)?;
        let loss = result.loss.expect("a loss");
        if let Some(leaders) = self.leaders {
            leaders.average([&loss])?;
        }
        loss.item()
    }

    /// Trains, and returns the loss of each step.
    fn train(&self) -> std::result::Result<Vec<f32>, Box<dyn Error>> {
        let options = self.options;
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {eta} left, {msg}")?;
        let bar = if self.replica == 0 {
            ProgressBar::new(options.steps as u64)
        } else {
            ProgressBar::hidden()
        };
        let bar = bar.with_style(style);
        let begin = Instant::now();
        let round = options.steps.div_ceil(ROUNDS);
        let mut losses = Vec::new();
        for step in 0..options.steps {
            losses.push(self.step(step)?);
            let tokens = ((step + 1) * options.batch * options.context) as f64;
            let rate = tokens / begin.elapsed().as_secs_f64();
            bar.set_message(format!("loss {:.3}, {rate:.0} tokens/s", losses[step]));
            bar.inc(1);
            if self.replica == 0 && ((step + 1) % round == 0 || step + 1 == options.steps) {
                let test = self.test()?;
                bar.suspend(|| {
                    println!(
                        "step {}: loss {:.3}, test loss {test:.3}, {rate:.0} tokens/s",
                        step + 1,
                        losses[step]
                    );
                });
            }
        }
        bar.finish();
        Ok(losses)
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
        for _ in 0..SAMPLE {
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

/// A line of the losses.
fn picture(losses: &[f32]) -> String {
    const SIZE: [f32; 2] = [640.0, 360.0];
    let most = losses.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    let mut points = String::new();
    for (step, loss) in losses.iter().enumerate() {
        let x = step as f32 / losses.len() as f32 * SIZE[0];
        write!(points, "{x:.1},{:.1} ", SIZE[1] * (1.0 - loss / most)).expect("memory");
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\">\
         <text x=\"300\" y=\"20\" font-size=\"14\">loss by step: from {:.2} to {:.2}</text>\
         <polyline points=\"{points}\" fill=\"none\" stroke=\"#3572b0\"/></svg>\n",
        SIZE[0],
        SIZE[1],
        losses[0],
        losses[losses.len() - 1],
    )
}

/// Lets the pipelines use this worker's stages; with replicas, their gradients are averaged.
fn add_stages<'w>(
    worker: &'w Worker,
    own: &[(u64, Stage)],
    averager: Option<&GradientAverager>,
    threads: usize,
) -> Result<PipelineStages<'w>> {
    let stages = own.iter().map(|(number, stage)| {
        let stage = stage.clone();
        PipelineStage::new(*number, move |batch| Ok([stage.forward(batch.input(0)?)?]))
            .loss(|batch| Ok(loss(batch.output(0)?, batch.target(0)?)?))
    });
    let mut options = PipelineStagesOptions::new().num_threads(threads as u64);
    if let Some(averager) = averager {
        options = options.averager(averager);
    }
    options.create(worker, "transformer", stages)
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
    let rank_of_stage = schedule.data()?.rank_of_stage;
    let processes = options.replicas * options.stages;
    let names: Vec<String> =
        (0..processes).map(|i| Options::name(i / options.stages, i % options.stages)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();

    let job = Job::start(&names)?;
    let worker = &job.worker;
    let place = worker.rank() as usize;
    let (replica, rank) = (place / options.stages, place % options.stages);
    let numbers = (0..rank_of_stage.len()).filter(|s| rank_of_stage[*s] as usize == rank);
    let count = rank_of_stage.len() as i64;
    let own = numbers
        .map(|s| Ok((s as u64, Stage::new(shape, s as i64, count)?)))
        .collect::<Result<Vec<_>>>()?;
    let parameters: Vec<&Tensor> = own.iter().flat_map(|(_, stage)| stage.parameters()).collect();
    let optimizer = Adam::adamw(LEARNING_RATE).betas(0.9, 0.95).weight_decay(0.1).create(
        worker,
        "",
        parameters.iter().copied(),
    )?;
    let (group, averager) = if options.replicas > 1 {
        let group = ProcessGroupOptions::new()
            .name(format!("rank {rank}"))
            .rank(replica as u32, options.replicas as u32)
            .create(worker)?;
        let averager = GradientAveragerOptions::new().create(&group, parameters.iter().copied())?;
        (Some(group), Some(averager))
    } else {
        (None, None)
    };
    let processors = thread::available_parallelism()?.get();
    let threads = (processors / processes).max(1);
    let stages = add_stages(worker, &own, averager.as_ref(), threads)?;
    worker.barrier(MINUTE)?; // all have their stages

    if rank == 0 {
        let workers = &names[place..place + options.stages];
        let leader = Leader {
            options: &options,
            worker,
            text: &text,
            pipeline: Pipeline::new(worker, "transformer", &schedule, workers)?,
            optimizer: &optimizer,
            leaders: group.as_ref(),
            replica,
        };
        let losses = leader.train()?;
        if replica == 0 {
            let test = leader.test()?;
            let sample = leader.write()?;
            println!("{sample}");
            fs::create_dir_all(&options.output)?;
            let rows = losses.iter().enumerate().map(|(i, loss)| format!("{},{loss}\n", i + 1));
            let table: String = rows.collect();
            fs::write(format!("{}/training.csv", options.output), format!("step,loss\n{table}"))?;
            fs::write(format!("{}/training.svg", options.output), picture(&losses))?;
            fs::write(format!("{}/sample.txt", options.output), sample)?;
            println!(
                "test loss {test:.3}; {}/ has the table, the picture and the sample",
                options.output
            );
            assert!(test < 0.8 * losses[0], "it has learnt nothing");
        }
    }
    worker.barrier(None)?; // until then the others answer
    drop((stages, optimizer));
    job.finish()
}
