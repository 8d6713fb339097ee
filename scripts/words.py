"""Search the code for names of before the renaming (decision 0026): none may be left where it belonged.

python scripts/words.py

A name is searched as a definition, in the module or class that it belonged to, by its name of today. Another module may
use the same name for something else. A module or class of the table that is no more is found, too. Modules are searched
as files, imports and dotted names in texts, but for `python -m trainkit.run.worker` and `.evaluator`: these commands
keep their names.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

NAMES: Final = """
api: launch_of
callbacks.screen: Closing Opening
callbacks.screen.reading: _Part
cluster.host: ProcessMark host_mark waited
cluster.launch: Launch
cluster.manifests.job: Engine Job Told
cluster.spec: _shown
config.check.unused_keys: _idle_for_launcher _idle_numerics _idle_rates without_effect without_effect_here
    without_effect_in
config.compose.composer: Composing
config.compose.jobs: Loader
config.compose.layers: Layers.lay settle
config.composition: ChoiceFile Composition.located Composition.noting Layered
config.identity: _idle _mildest
config.schema: Watched
config.sections: Batch Checkpoint Clip Compile Cv Elastic Eval Loader LrScaling Numerics Supervisor Sweep Warmup
config.targets.checks: Neighbours _built_problems _judges_itself
config.yaml_files: Trap
data.reading.collate: _only
data.reading.in_process: Direct
data.reading.loader: Source
data.reading.reader: _Stillness
data.reading.windows: cover
data.reading.workers: opened
data.splits: _Part _PartInMemory
errors: _shown
numerics.deferred.building: initial_values
numerics.deferred.recording: Entry Seen rewound
objectives.base: Tally
objectives.own_loss: OwnLoss
report.tables: _shown
run.backends.attempt: open_attempt seen_attempt
run.backends.driver: _shown
run.backends.worker: Place _seen cargo_of
run.begin: Recording Start
run.equivalence.comparing: _shown
run.folder.fencing_token: Fence FencingToken.handed FencingToken.holder FencingToken.put_up FencingToken.seen
run.folder.restart_record: note_restart
run.folder.rollbacks: note_rollback suspect_of
run.folder.run_folder: take_folder
run.folder.status: Finding look_at
run.hang_detection: Evidence Overdue
run.planning.build: Parts build_parts shaped_model shaping_of
run.planning.memory: abstract_model
run.estimates.out_of_memory: _Way _narrower _told _ways_out telling_of_memory
run.planning.plan: RunPlan.assistants RunPlan.decided RunPlan.micro_follows RunPlan.parts _told _told_of_skips
run.planning.plan_all: rehearse
run.process.error_report: ErrorReport.aftermath ErrorReport.brief ErrorReport.final ErrorReport.moment LastWords _shown
    last_words read_last_words words_from write_last_words
run.process.fork_server: ForkServer._bury ForkServer._told ForkServerClient.tell Forks Order become may_fork rank_groups
    warm_up
run.process.heartbeat: Pulse pulse_of read_pulse
run.process.setup: identity_in into_log prepare_process
run.process.worker_group: Exited WorkerGroup._tell _pass_on _signals_held arm hold
run.process_backend: Connection Engine Job
run.rendezvous.barrier: Meeting ProcessBarrier._leave ProcessBarrier._next_round ProcessBarrier._patience
    ProcessBarrier.ask ProcessBarrier.each ProcessBarrier.first ProcessBarrier.gather ProcessBarrier.hurry
    ProcessBarrier.leave_word ProcessBarrier.recall ProcessBarrier.remember ProcessBarrier.tell _arrive _shown
    differences follow lead likeness refuse_other_configs refuse_other_plans
run.rendezvous.join: _folder _host _start train_launched
run.rendezvous.late_join: _FAREWELL_S _explain _leave _word join_late late_ranks let_in shared_token
run.rendezvous.local_workers: LocalRanks launch_from
run.rendezvous.relaunch: forget_folder remember_folder start_of_launch
run.rendezvous.shutdown: _dismissed _echo _explained end_together
run.rendezvous.store_client: Board Patience StoreClient._probe StoreClient.doubt
run.runner: _end _evaluate_politely _missing _places
run.session.async_evaluator: CheckpointEvaluator._claim CheckpointEvaluator._tell CheckpointEvaluator._told Evaluator
    _LOOK_S _LeftOffError _mark evaluate_beside
run.session.auxiliary: assist unforeseen_data
run.session.checkpointer: Checkpointer.announce Checkpointer.mark Checkpointer.takes_part Keeper
run.session.evaluation: EvalRunner._told EvalRunner.is_fresh EvalRunner.judge Scorer
run.session.restore: Restorable begin_where_it_stood refuse_unfit run_of training_of
run.session.session: Session TaskSession._agree TaskSession._confirm TaskSession._occasions TaskSession._requested
    TaskSession.confirm TaskSession.listen
run.signals: end_process
run.supervisor.attempts: AttemptRunner._diagnose AttemptRunner._end_stragglers AttemptRunner._look
    AttemptRunner._make_room AttemptRunner._note_end AttemptRunner._say AttemptRunner._take AttemptRunner.has_begun
    Attempts _FAREWELL_S _LOOK_S let_owner_save
run.supervisor.failure: Failure.final Failure.words _most_behind _silent _told culprit hung unanswering
run.supervisor.restart_policy: Raised Relaunch Replacing RestartRule TaskRestarter._say TaskRestarter.concerns
    TaskRestarter.dismiss TaskRestarter.life TaskRestarter.mourn _Record _RestartHistory.fruitless
    _RestartHistory.stillborn note_relaunch
run.supervisor.self_watch: CountedBeats OwnWatch
run.supervisor.supervisor: ReplicaMembership.blame ReplicaMembership.muster ReplicaMembership.settle Roster
    _Member.strikes _Place _say _until_done.say
run.task: compiling_told
strategies.base: Bench Facts Part Position Strategy.align Strategy.assist Strategy.catch_up Strategy.computes_together
    Strategy.decided Strategy.defers Strategy.findings Strategy.gathered Strategy.held Strategy.hold
    Strategy.holds_pieces Strategy.is_another_training Strategy.leave Strategy.parts Strategy.problems
    Strategy.problems_with Strategy.recall Strategy.remember Strategy.replaces Strategy.settle Strategy.settles_at
    Strategy.shards_a_replica Strategy.spread Strategy.trains Strategy.voice
strategies.central_storage.executor: Central Flight _Errand hand_out_or_apply handed_out settle_like tickets_to_hand_out
strategies.core.optimizer: OptimizerStepper.forget Stepper
strategies.core.replica: Held masters_apart
strategies.core.sharded.base: batch_of_first_rank
strategies.core.sharded.replica: Cut
strategies.core.step: Divisor ShardStep._share ShardStep._take ShardStep.discover StepWork in_all_places own_memory
    settle_exchange
strategies.groups.process_group: Alone Grouped tell_all
strategies.local_sgd.averaging: AveragingWindow.note Outer Window
strategies.model_transforms.shape: Shaping Unit shape units_of
strategies.object_snapshot: Contents
strategies.parameter_server.coordinator.async_scheduler: AsyncDesk AsyncScheduler._give_back AsyncScheduler._take
    AsyncScheduler.again AsyncScheduler.ready
strategies.parameter_server.coordinator.dispatcher: Chief Event Seat Staff UpdateDispatcher._forget
    UpdateDispatcher._give_up_on_silent UpdateDispatcher._hear_report UpdateDispatcher._lose UpdateDispatcher._make
    UpdateDispatcher._say_idle WorkerRegistry.attend WorkerRegistry.dismiss WorkerRegistry.employ WorkerRegistry.hear
strategies.parameter_server.coordinator.replay_scheduler: ReplayDesk ReplayScheduler._give_back ReplayScheduler._take
    ReplayScheduler.again ReplayScheduler.ready
strategies.parameter_server.coordinator.scheduler: Desk Errand Merge WorkScheduler._give_back WorkScheduler._take
    WorkScheduler._throw WorkScheduler.again WorkScheduler.ready WorkScheduler.thrown_away
strategies.parameter_server.coordinator.staleness: Staleness.judge Verdict told_staleness
strategies.parameter_server.coordinator.state: CoordinatorExecutor._appoint CoordinatorExecutor.begin
    CoordinatorExecutor.mirror Office
strategies.parameter_server.coordinator.sync_scheduler: SyncDesk SyncScheduler._give_back SyncScheduler._take
    SyncScheduler.again SyncScheduler.ready
strategies.parameter_server.coordinator.update_log: Line Part Record
strategies.parameter_server.server.aggregation: GradientAggregator.add_up Merging Told Wishes
strategies.parameter_server.server.gradient_buffer: Gradient Spares
strategies.parameter_server.server.main: _Server._bye _Server.attend _nobody
strategies.parameter_server.server.shard: Held Loan ServerShard._leave_readers_alone ServerShard._stretches
    ServerShard.give_back ServerShard.lend
strategies.parameter_server.settings: Setting hold_a_share work
strategies.parameter_server.strategy: _idle
strategies.parameter_server.wire.address_book: Meeting
strategies.parameter_server.wire.auth: AuthenticatedListener.turned_away Listener _STRANGERS _TurnedAwayError _admitted
    _greet
strategies.parameter_server.wire.client: ParameterServerClient.bye ParameterServerClient.discard
    ParameterServerClient.drop Reached Servers
strategies.parameter_server.wire.encoding: Landing Wholes outgoing
strategies.parameter_server.wire.protocol: RefusedError name_of take_gradient
strategies.parameter_server.wire.transport: Connection.trust Link
strategies.parameter_server.wire.variable_shards: Rows Shares
strategies.parameter_server.wire.work_channel: Errands LocalErrands Order RemoteErrands Report keys_of
strategies.parameter_server.worker_task: Team Worker._carry_out Worker._looking_up _HandedOver _Part
strategies.partition.blocks: Unit units_of
strategies.partition.device_layout: Layout
strategies.partition.solver: Fitting
strategies.partition.syntax: layout_problems
strategies.pipeline.microbatch: Clock Surroundings
strategies.pipeline.schedules: taken
strategies.pipeline.stage_assignment: Cut
strategies.pipeline.strategy: Kept
strategies.pipeline.tracing.program: Call Held Shape Stretch
strategies.pipeline.tracing.stage_module: Segment
strategies.reducers.deterministic: LaneReducer _leaf
strategies.reducers.flat: ToOneDeviceTransport
strategies.reducers.gradient_vector: OwnVector
strategies.reducers.options: Reducing
strategies.reducers.shared_memory: Segment
strategies.step_values: LocalModel.collective LocalModel.everyone LocalModel.figures LocalModel.is_owner
    LocalModel.open_data Outcome Placed Rule Training Update Weighing
strategies.tensor_parallel.cutting: Regions
strategies.tensor_parallel.plans: Chosen Fitted fitted repeated_draws
strategies.tensor_parallel.strategy: _shown
strategies.tensors.layouts: OnOneDevice Packing Spread
strategies.tensors.lazy_state: Stored chosen region_of weights_in
strategies.tensors.sharded: Piece Pieces _told assembled misfit streamed
sweeps.backends.base: JobEngine
sweeps.backends.job_spec: Described
sweeps.backends.submitit_jobs: _Job
sweeps.job_sources: Job Listed Source
sweeps.loop.processes: Start
sweeps.loop.slots: Grant
sweeps.loop.sweep_loop: Round SweepLoop._look SweepLoop._pass_on SweepLoop._readied SweepLoop._told _Running.twins
sweeps.results.job_results: Entry Record _told swept
sweeps.results.metric_stream: Rows
sweeps.screen: Line
sweeps.spaces.request: Asked drawn
trainer.checkpoint.background: SaverOfPieces
trainer.checkpoint.loading: _Cut _Entry
trainer.checkpoint.retention: Judged
trainer.checkpoint.saving: Part
trainer.checkpoint.tensor_file: _Entry
trainer.cleanup: clear_drafts delete_draft draft_of
trainer.failpoints: arm reached
trainer.loop: Agreement Answer Occasion Timeline each_steps periods settling
trainer.manifest: scan survey
trainer.metrics_accumulator: Journal
trainer.ownership: Owner
verbs.looking.diff: _shown
verbs.running.train: with_folds
verbs.support.call: Call.only
verbs.support.points: _applying_nowhere
"""
"""Module of today: the old names of its classes, functions and constants, and of members as `ClassOfToday.member`."""

MODULES: Final = """
cluster.emit cluster.emit.job cluster.emit.kubernetes cluster.emit.skypilot cluster.emit.slurm cluster.emit.torchrun
cluster.emit.vertex cluster.processes config.allowed config.build config.check config.compose.composing
config.doclines config.documents config.effects config.exclusive config.kinds config.neighbours config.origins
config.own_folders config.places config.references config.resuming config.searching config.secret_keys
config.semantics config.targets config.watched data.collate data.digits data.direct data.fashion_mnist data.files
data.image_folder data.iterable data.loader data.positions data.reading data.sources data.synthetic data.text
data.token_memmap data.windows data.workers engine engine.agreement engine.checkpoint engine.checkpoint.background
engine.checkpoint.dtypes engine.checkpoint.judged engine.checkpoint.loading engine.checkpoint.retention
engine.checkpoint.saving engine.checkpoint.snapshot engine.checkpoint.space engine.checkpoint.stored
engine.checkpoint.tensor_file engine.checkpoint.together engine.checkpoint.weights engine.cleaning engine.evaluate
engine.events engine.failpoints engine.journal engine.left_out engine.loop engine.manifest engine.ownership
engine.state numerics.deferred.posing run.after_effects run.alikeness run.arriving run.assisting run.attempts
run.awaiting run.beginning run.board run.building run.compiling run.coupling run.cut_facts run.ending run.engines
run.engines.attempt run.engines.base run.engines.driver run.engines.rank run.engines.ray_train run.engines.spark
run.entering run.environment run.evaluating run.evaluator run.evaluator_end run.evidence run.failure run.fence
run.folder run.forking run.forks run.group run.heartbeat run.joining run.keeping run.last_save run.last_words
run.latecomers run.launched run.lifeline run.limits run.local_ranks run.lock run.meeting run.memory run.memory_errors
run.model_facts run.model_file run.network run.nursery run.occasions run.out_of_memory run.outcome run.own_watch
run.owner_saving run.parting run.passes run.pauses run.plan run.proof run.proof.answers run.proof.comparing
run.proof.diagnosing run.proof.proving run.proof.running run.proof.sameness run.proof_records run.ranks run.recording
run.rehearsal run.relaunching run.rendezvous run.replacing run.restart_record run.restarting run.rollbacks run.roster
run.saved_state run.scheduling run.scoring run.session run.skipped run.stacks run.status run.stopping run.supervisor
run.taking run.waiting run.watching run.worker strategies.alone strategies.averaging strategies.buffers
strategies.central strategies.central.asynchronous strategies.central.copies strategies.central.step
strategies.central.storage strategies.collective strategies.contents strategies.crossing strategies.data_parallel
strategies.device_map strategies.devices strategies.exchanged strategies.forward_backward strategies.fsdp
strategies.given strategies.grouped strategies.layouts strategies.limits strategies.local_sgd strategies.maps
strategies.maps.activations strategies.maps.balance strategies.maps.fitting strategies.maps.judging
strategies.maps.placing strategies.maps.syntax strategies.maps.units strategies.mesh strategies.mirrored
strategies.multi_worker_mirrored strategies.optimizer strategies.packing strategies.parameter_server.asynchronous
strategies.parameter_server.chief strategies.parameter_server.clients strategies.parameter_server.desk
strategies.parameter_server.errands strategies.parameter_server.greeting strategies.parameter_server.held
strategies.parameter_server.limits strategies.parameter_server.links strategies.parameter_server.meeting
strategies.parameter_server.merging strategies.parameter_server.moving strategies.parameter_server.norms
strategies.parameter_server.office strategies.parameter_server.policies strategies.parameter_server.reaching
strategies.parameter_server.record strategies.parameter_server.replaying strategies.parameter_server.server
strategies.parameter_server.setting strategies.parameter_server.shares strategies.parameter_server.staff
strategies.parameter_server.staging strategies.parameter_server.synchronous strategies.parameter_server.tables
strategies.parameter_server.team strategies.parameter_server.variables strategies.parameter_server.wholes
strategies.parameter_server.wire strategies.parameter_server.worker strategies.pieces strategies.pipeline.calling
strategies.pipeline.cutting strategies.pipeline.holding strategies.pipeline.judging strategies.pipeline.limits
strategies.pipeline.program strategies.pipeline.recording strategies.pipeline.segment strategies.pipeline.tracing
strategies.pipeline.trying strategies.pipeline.watching strategies.reducers.lanes strategies.reducers.segment
strategies.reducing strategies.replica strategies.replica_check strategies.shaping strategies.shaping.compiling
strategies.shaping.recomputing strategies.shaping.shape strategies.shaping.units strategies.sharded
strategies.sharded.base strategies.sharded.cuts strategies.sharded.elementwise strategies.sharded.filling
strategies.sharded.freeing strategies.sharded.fully strategies.sharded.norms strategies.sharded.replica
strategies.sharded.stand_in strategies.sharded.units strategies.sharded.work strategies.sparse strategies.spread
strategies.stored strategies.synchronous strategies.telling strategies.tensor_parallel.regions strategies.update
sweeps.engines sweeps.engines.base sweeps.engines.described sweeps.engines.launching
sweeps.engines.ray_tasks sweeps.engines.starting sweeps.engines.submitit_jobs sweeps.ensemble sweeps.entries
sweeps.folds sweeps.jobs sweeps.leaderboard sweeps.processes sweeps.progress sweeps.record sweeps.round sweeps.slots
sweeps.spaces.asking sweeps.spaces.drawing sweeps.spaces.rows sweeps.spaces.sweeping sweeps.stopping sweeps.sweep
sweeps.warm sweeps.warming verbs.call verbs.completion verbs.diff verbs.emit verbs.ensemble verbs.explain verbs.flags
verbs.folding verbs.ls verbs.plan verbs.points verbs.prove verbs.resume verbs.runs verbs.top verbs.train
"""
"""Old modules; one that is the name of a package today counts as renamed."""

MAY_MENTION: Final = ("scripts/words.py", "CHANGELOG.md")
"""Files that hold old names on purpose; so do `benchmarks/results`."""


def rows(table: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the old name of each entry of a table."""
    for line in re.sub(r"\n +", " ", table).strip().splitlines():
        module, _, names = line.partition(": ")
        for name in names.split():
            yield f"trainkit.{module}", name


def file_of(module: str) -> Path:
    """Return the file of a dotted module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def definitions(file: Path) -> frozenset[str]:
    """Return the names that a file defines: `name` of the module, `Class.member` of its classes."""
    return frozenset(_defined(ast.parse(file.read_text()).body))


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield name
                yield from (f"{name}.{member}" for member in [*_defined(node.body), *_attributes(node)])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                yield from _defined([*inner, *other])
            case _:
                pass


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that methods of a class assign to `self`."""
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass


def found_names(table: str) -> list[str]:
    """Return the names of a table that are still defined where they belonged, and the homes that do not exist."""
    found = []
    for home, name in rows(table):
        file, (owner, *member) = file_of(home), name.split(".")
        if not file.is_file():
            found.append(f"{home} is no module. Write {name} at the one that has its subject now")
        elif member and owner not in definitions(file):
            found.append(f"{home} has no {owner}. Write {name} with the class, and at the module, that has it now")
        elif name in definitions(file):
            found.append(f"{home}: {name}")
    return found


def found_modules() -> list[str]:
    """Return where an old module still is a file, or is named by its dotted name or its path."""
    old = [name for name in MODULES.split() if file_of(f"trainkit.{name}").name != "__init__.py"]
    found = [f"trainkit.{name} is a module" for name in old if file_of(f"trainkit.{name}").is_file()]
    words = "|".join(sorted((re.escape(name).replace(r"\.", "[./]") for name in old), key=len, reverse=True))
    named = re.compile(rf"(?<![\w/.])(?<!python -m )trainkit[./](?:{words})(?:\.py)?(?![\w/]|\.\w)")
    for file in _files():
        name = file.relative_to(ROOT).as_posix()
        if name in MAY_MENTION or name.startswith("benchmarks/results/"):
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            found += [f"{name}:{number}: {match[0]}" for match in named.finditer(line)]
    return found


def _files() -> Iterator[Path]:
    """Yield the texts of the repository in which a module may be named."""
    folders = ("trainkit", "tests", "scripts", "benchmarks", "hydra_plugins", "conf", "recipes", "docs")
    for file in [*ROOT.glob("*"), *(file for folder in folders for file in ROOT.joinpath(folder).rglob("*"))]:
        if file.suffix in {".py", ".md", ".yaml", ".toml"} and file.is_file():
            yield file


def main() -> int:
    """Print what is left, and return 1 where there is any."""
    found = [*found_names(NAMES), *found_modules()]
    print("\n".join([*found, f"{len(found)} old names found"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
