import { client, run } from './session.mjs'

const { Kafka, logLevel } = client.default

await run(async (address, topic) => {
  const kafka = new Kafka({ brokers: [address], logLevel: logLevel.NOTHING, retry: { initialRetryTime: 10 } })
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 })
  await producer.connect()
  return {
    send: value => producer.send({ topic, acks: -1, messages: [{ partition: 0, value }] }),
    close: () => producer.disconnect()
  }
})
